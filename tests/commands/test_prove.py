"""``plait prove`` as its user sees it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from plait.referee.prove import Counterexample, PaperRun, Proved, Refuted
from plait.run.commands import prove
from plait.run.commands.main import main, parse
from plait.run.commands.prove import ProveConfig
from plait.run.config.settings import TrainConfig
from plait.run.job.sections import flag_hints


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


SIZES = ["--layers", "5", "--width", "32", "--heads", "4", "--vocab", "71"]


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main(["prove", *words]) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_what_was_proved_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mesh", "replica=2 shard=2 pipe=2", "--strategy", "hsdp", "--microbatches", "3"]
    shown = said(capsys, 0, *words, *SIZES)
    assert "proved: hsdp on pipe=2 replica=2 shard=2" in shown
    assert "adds 3 microbatches of 4 data ranks once: shard then microbatch then replica" in shown
    assert "8, each compared with its model rank" in shown


def test_a_counterexample_is_an_answer_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuted(run: PaperRun) -> Proved:
        raise Refuted(Counterexample("owners", "1 of 2 stages have it", parameter="lm_head.weight"))

    monkeypatch.setattr(prove, "prove", refuted)
    shown = said(capsys, 1, "--mesh", "shard=2", "--json", str(tmp_path / "proof.json"), *SIZES)
    assert shown.startswith("refuted: owners: 1 of 2 stages have it (parameter lm_head.weight)")
    found = json.loads((tmp_path / "proof.json").read_text())
    assert not found["proved"] and found["counterexample"]["what"] == "owners"


def test_the_result_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 5, "hidden_size": 32, "intermediate_size": 43}
    config |= {"num_attention_heads": 4, "vocab_size": 71}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["prove", "--mesh", "shard=3", "--model", f"hf:{tmp_path}", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["proved"] and found["ranks"] == 3 and found["order"] == ["shard", "replica", "microbatch"]


def test_its_flags_mean_what_those_of_train_mean() -> None:
    words = ["--mesh", "shard=2", "--batch", "48", "--dtype", "bf16-mixed", *SIZES]
    run = parse(["prove", *words]).paper()
    assert (run.batch, run.strategy.params.dtype, run.decoder.hidden) == (3, "bf16", 32)
    flags = {field.name for field in fields(ProveConfig)} - {"gated"}
    assert flags <= {*flag_hints(TrainConfig)}
