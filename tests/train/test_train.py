"""``plait train``: its output and files, and that additions to a step keep it the one-process run."""

import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import made, metrics, write_text
from waiting import wait_for

from plait.comm.base import Comm
from plait.referee.verify.reference import run_reference
from plait.run.commands.main import main, parse
from plait.run.config.file import from_toml, to_toml
from plait.run.config.settings import TrainConfig
from plait.run.config.sinks import Sinks
from plait.run.job.job import make_job
from plait.run.job.sections import flags
from plait.run.train.run import run_train
from plait.table.additions import additions
from plait.table.cells import find_strategy
from plait.zero.state.init import materialise

SIZES = ["--layers", "1", "--width", "32", "--heads", "2", "--kv-heads", "1", "--length", "16", "--batch", "5"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory, 150)


@pytest.fixture
def train(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``plait train`` on threads; gives its summary, its metrics and what it printed."""

    def run(*words: str, code: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
        out = tmp_path / "out"
        flags = ["--world", "thread", *SIZES, "--data", text, "--out", str(out), "--overwrite"]
        assert main(["train", *flags, *words]) == code
        return json.loads((out / "summary.json").read_text()), metrics(out), capsys.readouterr().out

    return run


SCHEDULED = ["--lr-schedule", "cosine", "--warmup", "2", "--min-lr", "0.2", "--weight-decay", "0.3"]


def test_all_of_a_loop_at_once_is_the_one_process_run(train: Any) -> None:
    """Epochs whose last step is smaller, workers, evaluation between steps, a schedule, microbatches."""
    layout = "--mesh shard=3 --strategy zero2 --microbatches 2"
    data = "--batch 19 --epochs 2 --workers 1 --eval-every 10 --eval-steps 2"
    summary, metrics, shown = train(*layout.split(), *data.split(), "--lr", "0.01", *SCHEDULED, "--verify")
    assert summary["equal_to_one_process"] is True and "verdict: bitwise" in shown
    steps = len(metrics)
    assert [line["lr"] for line in metrics[:3]] == [0.005, 0.01, 0.01] and 0.002 <= metrics[-1]["lr"] < 0.005
    assert steps % 2 == 0 and metrics[steps // 2 - 1]["tokens"] < metrics[0]["tokens"]
    assert [line["step"] for line in metrics if "eval_loss" in line] == [*range(10, steps, 10), steps]


def test_a_loss_that_is_not_finite_ends_the_run_with_a_last_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--mesh", "shard=2", "--steps", "9", "--optimizer", "sgd", "--lr", "1e20", "--clip", "None"]
    assert main(["train", "--world", "thread", *SIZES, "--data", text, "--out", str(tmp_path), *words]) == 1
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")) for line in lines]
    last = metrics.pop()
    assert last.keys() == {"step", "stopped"} and last["step"] == len(metrics) + 1
    assert "not finite" in last["stopped"] and "on rank" in last["stopped"]
    shown = capsys.readouterr().err
    assert shown.startswith("plait: error: step") and "Traceback" not in shown


def test_steps_that_are_not_finite_may_be_left_out(train: Any) -> None:
    words = ["--mesh", "shard=2", "--steps", "5", "--optimizer", "sgd", "--lr", "1e20", "--clip", "None"]
    summary, metrics, shown = train(*words, "--nonfinite", "skip", "--eval-every", "2")
    left_out = [line for line in metrics if not line.get("made", True)]
    assert left_out and len(metrics) == 5
    assert all(line["loss"] is None for line in left_out if line["step"] == 5)
    assert f"step {left_out[0]['step']}: skipped, loss or gradients not finite" in shown
    assert "NaN" not in json.dumps(summary)


def plain_held_out_loss(config: TrainConfig) -> tuple[float, int]:
    """One process at the end, on every held-out sample."""
    job = make_job(config.task, config.dtypes)
    layout, task = config.layout, config.task
    order = additions(find_strategy(layout.strategy))
    record = run_reference(
        job, config.machine.parsed_mesh, layout.microbatches, order, task.samples.steps, clip=task.update.clip
    )
    model = job.build()
    materialise(model, job.seed, torch.device("cpu"))
    model.load_state_dict(record.parameters | record.buffers, strict=False)
    model.eval()
    batches = [batch for step in job.eval_batches(0, 1, 1) for batch in step]
    with torch.no_grad():
        total = sum(job.loss_fn(model, batch).item() for batch in batches)
    count = sum(map(job.count_fn, batches))
    return total / count, count


def test_the_held_out_loss_is_that_of_the_whole_model_and_changes_nothing(train: Any, text: str) -> None:
    words = ["--mesh", "shard=2", "--microbatches", "2", "--steps", "5"]
    summary, metrics, shown = train(*words, "--eval-every", "2", "--verify")
    assert [line["step"] for line in metrics if "eval_loss" in line] == [2, 4, 5]
    config = parse(["train", *SIZES, "--data", text, *words])
    assert isinstance(config, TrainConfig)
    loss, count = plain_held_out_loss(config)
    assert summary["eval_loss"] == metrics[4]["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics[4]["eval_tokens"] == count > 100
    assert f"step 5: held-out loss {loss:.4f} ({count:,} tokens)" in shown
    assert "verdict: bitwise" in shown
    assert "sent per step" in shown
    assert shown.count("to the byte") == 4
    assert [line["loss"] for line in train(*words)[1]] == [line["loss"] for line in metrics]


def test_an_evaluation_is_of_twenty_batches_unless_more_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("abcdefghij" * 2500)
    words = [*SIZES, "--batch", "3", "--length", "8", "--mesh", "shard=1", "--world", "thread", "--steps", "1"]
    tokens = []
    for more in ([], ["--eval-steps", "None"]):
        data = ["--data", str(tmp_path / "text"), "--eval-every", "0", "--json", "-"]
        assert main(["train", *words, *data, *more]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["metrics"][0]["eval_tokens"])
    assert tokens[0] == 20 * 3 * 8 < tokens[1]


def test_an_evaluation_at_the_end_only_none_or_of_a_part(train: Any) -> None:
    def steps(*words: str) -> list[tuple[int, int]]:
        _, metrics, out = train("--mesh", "shard=2", "--steps", "3", *words)
        assert "to the byte" in out and "not predicted" not in out, "told of the last step, not of the evaluation"
        return [(line["step"], line["eval_tokens"]) for line in metrics if "eval_loss" in line]

    assert steps() == []
    ((at, all_tokens),) = steps("--eval-every", "0")
    assert at == 3
    assert steps("--eval-every", "0", "--eval-steps", "1") == [(3, 5 * 16)]
    assert all_tokens > 5 * 16


def test_the_resolved_config_is_the_same_run_again(train: Any, tmp_path: Path) -> None:
    words = ["--mesh", "replica=2", "--strategy", "zero1", "--steps", "3", "--clip", "None", "--hold", "None"]
    summary, metrics, _ = train(*words, "--lr", "0.02")
    file = tmp_path / "out" / "config.toml"
    again = parse(["train", "--config", str(file)])
    assert isinstance(again, TrainConfig)
    given = flags(again)
    assert [given[name] for name in ("clip", "hold", "lr", "layers")] == [None, None, 0.02, 1]
    assert {**summary["config"], "config": str(file), "overwrite": False} == json.loads(json.dumps(given))
    assert main(["train", "--config", str(file), "--overwrite"]) == 0
    assert [line["loss"] for line in made(tmp_path / "out")] == [line["loss"] for line in metrics]


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(clip=None, hold=None, layers=3, dropout=0.0, weight_decay=1e-9, lr=1e22),
        TrainConfig(data='C:\\a "b"\n\tü😀\x7f', out="/a'b", strategy="mine: full | full | full | full", verify=True),
    ],
)
def test_every_value_survives_the_file(config: TrainConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(replace(config, config="elsewhere.toml")), encoding="utf-8")
    assert from_toml(TrainConfig, str(path)) == config
    assert "split" not in path.read_text()  # a None that is the default


def test_the_file_of_a_run_by_epochs_says_epochs_and_no_steps(tmp_path: Path) -> None:
    """Its steps follow from the data, and a file may not say both."""
    path = tmp_path / "config.toml"
    path.write_text(to_toml(TrainConfig(epochs=2, steps=14)), encoding="utf-8")
    assert from_toml(TrainConfig, str(path)) == TrainConfig(epochs=2)


def test_the_summary_says_what_was_run_with_what(train: Any) -> None:
    summary, metrics, _ = train("--mesh", "shard=2", "--steps", "2")
    assert summary["command"].startswith("plait train --world thread --layers 1 ")
    assert "--mesh shard=2 --steps 2" in summary["command"]
    assert summary["versions"]["torch"] == torch.__version__
    assert set(summary["versions"]) == {"plait", "torch", "python"}
    assert metrics[-1]["peak_memory"] == summary["peak_memory"] > 50 << 20


def test_the_standard_output_is_only_json_when_it_is_asked_for(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--world", "thread", "--mesh", "shard=2", *SIZES, "--data", text, "--steps", "2"]
    assert main([*words, "--eval-every", "1", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["metrics"]) == 2
    assert "held-out loss" in shown.err


def test_sinks_are_closed_when_a_step_raises(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    add = Sinks.add_json_lines
    monkeypatch.setattr(Sinks, "add_json_lines", lambda self, *to: (add(self, *to), self.callback(closed.append, 1)))

    def broken(config: TrainConfig, comm: Comm, argv: Any) -> int:
        monkeypatch.setattr(comm.ledger, "clear", lambda: 1 / 0, raising=False)
        return run_train(config, comm, argv)

    monkeypatch.setattr("plait.run.commands.train.run_train", broken)
    words = ["train", "--world", "thread", "--mesh", "shard=1", *SIZES, "--data", text, "--out", str(tmp_path)]
    assert main(words) == 1
    assert closed == [1]


@pytest.mark.parametrize(("world", "number"), [("thread", signal.SIGINT), ("process", signal.SIGTERM)])
def test_a_run_that_is_stopped_keeps_its_metrics(
    world: str, number: signal.Signals, text: str, tmp_path: Path, start: Any
) -> None:
    words = [*SIZES, "--world", world, "--mesh", "shard=2", "--data", text, "--out", str(tmp_path)]
    words += ["--steps", "1000000", "--log-every", "1000000"]
    process = start(sys.executable, "-m", "plait", "train", *words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    file = tmp_path / "metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (file.exists() and file.read_text().count("\n") > 2), 60)
    assert process.poll() is None, process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=110)
    first, last = err.splitlines()
    assert first.startswith(f"plait: {number.name}: all ranks end after their step")
    told = rf"plait: {number.name} \(on rank \d\): stopped after step \d+ of 1000000; nothing was saved"
    assert re.match(told, last)
    assert process.returncode == 128 + number
    assert "1/1000000  loss" in out
    steps = [line["step"] for line in metrics(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
