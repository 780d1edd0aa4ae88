"""The places to which a run writes numbers: each tool can read its own back."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from plait.run.config.sinks import check_sinks, open_sinks

LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 5.25, "grad_norm": None, "tokens": 64, "seconds": 0.5},
    {"step": 2, "loss": 4.5, "grad_norm": None, "tokens": 63, "eval_loss": 4.75},
]


def missing(name: str) -> bool:
    return importlib.util.find_spec(name) is None


def test_lines_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    sinks = open_sinks(str(tmp_path / "a" / "b"), tensorboard=False, wandb=None, settings={})
    path = tmp_path / "a" / "b" / "metrics.jsonl"
    for number, line in enumerate(LINES, 1):
        sinks.write(line)
        assert [json.loads(text) for text in path.read_text().splitlines()] == LINES[:number]
    sinks.close()


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sinks = open_sinks(None, tensorboard=False, wandb=None, settings={})
    sinks.write(LINES[0])
    sinks.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(missing("tensorboard"), reason="needs tensorboard")
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_tensorboard_reads_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(str(tmp_path), tensorboard=True, wandb=None, settings={})
    for line in LINES:
        sinks.write(line)
    events = EventAccumulator(str(tmp_path))  # before close: a rank that is stopped closes nothing
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "tokens", "eval_loss", "seconds", "tokens_per_second"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 5.25), (2, 4.5)]
    assert [(e.step, e.value) for e in events.Scalars("eval_loss")] == [(2, 4.75)]
    assert [(e.step, e.value) for e in events.Scalars("tokens_per_second")] == [(1, 128.0)]
    sinks.close()
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.skipif(missing("wandb"), reason="needs wandb")
@pytest.mark.filterwarnings("default")
def test_weights_and_biases_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sinks = open_sinks(str(tmp_path), tensorboard=False, wandb="plait-test", settings={"lr": 0.1})
    for line in LINES:
        sinks.write(line)
    sinks.close()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.parametrize(("name", "flag"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": "p"})])
def test_a_missing_package_is_named_with_the_command(
    name: str, flag: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = {"tensorboard": False, "wandb": None, **flag}
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"{name} is not installed: pip install 'plait\[{name}\]'"):
        check_sinks(**asked)
