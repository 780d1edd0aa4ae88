"""Where the numbers of each step go while a run is under way.

    {"step": 7, "loss": 2.6, "lr": 0.003, ...}  ──► metrics.jsonl       one object a step
                                                ├─► TensorBoard         event files
                                                └─► Weights & Biases    a project

What was written before a run is stopped stays.
"""

import importlib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Line = Mapping[str, Any]


class Sink(Protocol):
    """Takes the numbers of a run, step by step, until it is over or stopped; ``line["step"]`` counts from 1."""

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """``metrics.jsonl`` in a folder: one object a line, flushed."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("w", encoding="utf-8")

    def write(self, line: Line) -> None:
        self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard's event files in a folder: a scalar for every number of a line."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, line: Line) -> None:
        for name, value in _numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a Weights & Biases project; WANDB_MODE=offline keeps it in ``folder`` (None: the working directory)."""

    def __init__(self, project: str, settings: Mapping[str, Any], folder: Path | None) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, config=dict(settings), dir=folder)

    def write(self, line: Line) -> None:
        self._run.log(_numbers(line), step=line["step"])

    def close(self) -> None:
        self._run.finish()


def finite(value: Any) -> Any:
    """With null for inf and NaN, which JSON has no words for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def _numbers(line: Line) -> dict[str, float]:
    """What can be drawn over the steps: all but the step itself and what has no value."""
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def write(self, line: Line) -> None:
        for sink in self._sinks:
            sink.write(line)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def check_sinks(out: str | None, *, tensorboard: bool, wandb: str | None) -> None:
    """Refuses, by a ValueError, sinks that have nowhere to write, or whose package is not installed."""
    if tensorboard and out is None:
        raise ValueError("tensorboard writes its event files into the folder out: give --out DIR")
    if wandb == "":
        raise ValueError("wandb '' names no project: give --wandb PROJECT")
    for asked, name in ((tensorboard, "tensorboard"), (wandb is not None, "wandb")):
        spec = importlib.util.find_spec(name) if asked else None
        if asked and (spec is None or spec.origin is None):  # without origin: only a folder of this name, here
            raise ValueError(f"{name} is not installed: pip install 'plait[{name}]', or leave --{name} out")


def open_sinks(out: str | None, *, tensorboard: bool, wandb: str | None, settings: Mapping[str, Any]) -> Sinks:
    """The sinks of a run, opened; ``out`` is made where it is missing."""
    folder = None if out is None else Path(out)
    sinks: list[Sink] = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        sinks.append(JsonLines(folder))
        if tensorboard:
            sinks.append(TensorBoard(folder))
    if wandb is not None:
        sinks.append(WeightsAndBiases(wandb, settings, folder))
    return Sinks(sinks)
