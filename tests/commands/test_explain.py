"""``plait explain`` and ``plait prove`` as their users see them; nothing runs."""

import json
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest

from plait.anymodel.tensor import resolve_carried
from plait.comm import Comm, run
from plait.referee.prove import Counterexample, PaperRun, Proved, Refuted
from plait.run.commands import prove
from plait.run.commands.explain import attending, planned
from plait.run.commands.main import main, parse
from plait.run.commands.prove import ProveConfig
from plait.run.config.settings import TrainConfig, VerifyConfig
from plait.run.job.job import build_model, make_job, use_axes
from plait.run.job.sections import flag_hints

GPT = VerifyConfig(model="gpt", layers=2, width=24, heads=6, kv_heads=2, batch=4, length=9, steps=1, mesh="tensor=2")


@pytest.mark.parametrize("config", [GPT, replace(GPT, model="llama"), replace(GPT, model="mlp", layers=5)])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_sends_what_its_modules_are_said_to_send(config: VerifyConfig, sequence: bool) -> None:
    if sequence and config.task.network.model == "mlp":
        return
    config = replace(config, strategy="ddp", sequence_parallel=sequence)
    job = make_job(config.task, config.dtypes)

    def train(comm: Comm) -> Counter[tuple[str, str]]:
        engine, _ = job.engine(comm, config.parallelism)
        engine.step(job.microbatches(0, 0, 1, 1))
        tensor = [e for e in comm.ledger.entries if e.note.phase.startswith("tensor")]
        return Counter((e.note.phase.split()[1], e.kind) for e in tensor)

    model = build_model(config.task)
    modules = list(planned(model, resolve_carried(model, 2, sequence=sequence), sequence=sequence))
    said = Counter(("forward", kind) for one in modules for kind in one.forward)
    said += Counter(("backward", kind) for one in modules for kind in one.backward)
    assert run(config.machine.parsed_mesh, train, deadline=20) == [said] * 2


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_attention_sends_what_it_is_said_to_send(model: str) -> None:
    config = replace(GPT, model=model, mesh="shard=2 context=2", length=8, strategy="ddp", dropout=0.0)
    job = make_job(config.task, config.dtypes)
    mesh = config.machine.parsed_mesh

    def train(comm: Comm) -> Counter[str]:
        engine, _ = job.engine(comm, config.parallelism)
        engine.step(job.microbatches(0, 0, 1, 1))
        return Counter(e.kind for e in comm.ledger.entries if e.note.phase.startswith("context"))

    known = use_axes(build_model(config.task), mesh)
    said = Counter(kind for one in attending(known, mesh) for kind in (*one.forward, *one.backward))
    assert said == {"all_gather": 4, "reduce_scatter": 4} and run(mesh, train, deadline=20) == [said] * 2


def test_identical_layers_are_shown_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["explain", "--layers", "3", "--width", "128", "--mesh", "tensor=2", "--sequence-parallel"]
    assert main([*words, "--json", "-"]) == 0
    modules = {one["name"]: one for one in json.loads(capsys.readouterr().out)["modules"]}
    assert sum(one["style"] == "row" for one in modules.values()) == 3
    assert modules["norm"]["pending"] == ["weight"] and modules["blocks.0.mlp.down"]["parameters"][0][1][0] == 128
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("row by") == 1 and "blocks.*.mlp.down x3" in shown and "…" not in shown


def test_experts_that_ranks_share_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--model", "moe", "--layers", "2", "--width", "16", "--ffn", "12", "--heads", "2"]
    assert main([*words, "--mesh", "shard=2 tensor=2 expert=2", "--json", "-"]) == 0
    modules = {one["name"]: one for one in json.loads(capsys.readouterr().out)["modules"]}
    experts = modules["blocks.1.mlp.experts"]
    assert experts["style"] == "expert=2" and experts["parameters"] == [["gate_up", [2, 24, 16]], ["down", [2, 16, 12]]]
    assert experts["forward"] == ["all_reduce", *["all_gather"] * 3, "reduce_scatter", "all_reduce"]


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
    assert {field.name for field in fields(ProveConfig)} <= {*flag_hints(TrainConfig)}
