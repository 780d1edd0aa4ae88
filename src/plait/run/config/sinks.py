"""Writes the numbers of each step during a run.

    {"step": 7, "loss": 2.6, "lr": 0.003, ...}  ──► metrics.jsonl       one object a step
                                                ├─► TensorBoard         event files
                                                └─► Weights & Biases    a project

Lines written before a run stops are kept.
"""

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from plait.checkpoint.files.writing import Lines, finite, told

Line = Mapping[str, Any]

METRICS = "metrics.jsonl"
"""Name of the file in a run's folder with one line per step."""


class Sinks(ExitStack):
    """Receives a run's lines until it ends or stops.  ``line["step"]`` counts from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[Callable[[Line], None]] = []

    def write(self, line: Line) -> None:
        for write in self.writers:
            write(line)

    def add_json_lines(self, folder: Path, after: int) -> None:
        """Adds ``metrics.jsonl`` in a folder: an object a line, written at once.  Keeps lines up to step ``after``."""
        lines = keep_lines(folder / METRICS, after)
        self.callback(lines.close)
        self.writers.append(lambda line: lines.write(json.dumps(finite(line), allow_nan=False)))

    def add_tensorboard(self, folder: Path, after: int) -> None:
        """Adds TensorBoard's event files in a folder: a scalar for every number of a line."""
        from torch.utils.tensorboard import SummaryWriter

        writer = self.enter_context(SummaryWriter(str(folder), purge_step=after + 1 if after else None))

        def write(line: Line) -> None:
            with told(folder, 0):
                for name, value in _numbers(line).items():
                    writer.add_scalar(name, value, line["step"])
                writer.flush()

        self.writers.append(write)

    def add_wandb(self, project: str, settings: Mapping[str, Any], folder: Path | None) -> None:
        """Adds a run of a Weights & Biases project.  WANDB_MODE=offline keeps it in ``folder`` (None: the current)."""
        run = importlib.import_module("wandb").init(project=project, config=dict(settings), dir=folder)
        self.callback(run.finish)
        self.writers.append(lambda line: run.log(_numbers(line), step=line["step"]))


def keep_lines(path: Path, last: int) -> Lines:
    """Opens a file of lines to continue it, and drops those after step ``last``, which the run repeats, and a line that
    was cut off.  Does not touch a file that another run is writing."""
    lines, kept = Lines(path), 0
    with suppress(ValueError, KeyError, TypeError):
        for line in lines.read().splitlines(keepends=True) if last else ():
            if not line.endswith(b"\n") or json.loads(line)["step"] > last:
                break
            kept += len(line)
    lines.cut(kept)
    return lines


def _numbers(line: Line) -> dict[str, float]:
    """Values that can be drawn over the steps: the speed, and all but the step itself and missing values."""
    speed = {"tokens_per_second": line["tokens"] / line["seconds"]} if line.get("seconds") else {}
    return speed | {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}


def check_sinks(*, tensorboard: bool, wandb: str | None) -> None:
    """Raises ValueError for sinks whose package is not installed."""
    for asked, name in ((tensorboard, "tensorboard"), (wandb is not None, "wandb")):
        if asked and importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed: pip install 'plait[{name}]', or leave --{name} out")


def open_sinks(
    out: str | None, *, tensorboard: bool, wandb: str | None, settings: Mapping[str, Any], after: int = 0
) -> Sinks:
    """Opens the sinks of a run that has completed ``after`` steps.  Creates ``out`` if it is missing."""
    sinks, folder = Sinks(), None if out is None else Path(out)
    if folder is not None:
        with told(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
        sinks.add_json_lines(folder, after)
        if tensorboard:
            sinks.add_tensorboard(folder, after)
    if wandb is not None:
        sinks.add_wandb(wandb, settings, folder)
    return sinks
