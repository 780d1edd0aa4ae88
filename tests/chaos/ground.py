"""The folders of a campaign: an undisturbed run, made once, and the disturbed runs.

ground.words(out, ...)     the same training each time: a small GPT on three ranks, zero3, dropout on
ground.same_run(out)       True if a run that went through a fault equals that run, to the bit
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random

from observed import Observed

from plait.checkpoint.folder import CHECKPOINTS
from plait.checkpoint.stored import Checkpoint
from plait.run.formats.differences import differences

STEPS, EVERY, RANKS = 40, 5, 3

MODEL = ("--layers", "2", "--width", "32", "--heads", "2", "--length", "16", "--batch", "12", "--dropout", "0.1")

PATIENCE = 120.0
"""Seconds after which a run that should have ended is ended."""


@dataclass
class Ground:
    """A folder, and the trials that were made in it."""

    folder: Path
    deadline: float = 20.0
    """How long a rank of the runs waits for another."""
    steps: int = STEPS
    random: Random = field(default_factory=lambda: Random(0))
    children: list[Observed] = field(default_factory=list)
    """The commands of the trial that is under way."""
    _made: int = 0

    @cached_property
    def text(self) -> Path:
        path = self.folder / "text.txt"
        path.write_text("".join(f"{i} {i * i} the {i % 7} quick {i % 11} brown foxes\n" for i in range(2000)))
        return path

    def new(self) -> Path:
        """A folder for the next run."""
        self._made += 1
        return self.folder / f"run-{self._made:03}"

    def start(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None, **more: Sequence[str]
    ) -> Observed:
        """A command of the trial, which does not outlive it."""
        child = Observed(words, environment, **more)
        self.children.append(child)
        return child

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Surrounds a trial: no process of it is left afterwards."""
        try:
            yield
        finally:
            for child in self.children:
                child.end()
            self.children.clear()

    def words(self, out: Path, *more: str, mesh: str = f"shard={RANKS}", strategy: str = "zero3") -> list[str]:
        """``plait train`` on the same job."""
        job = (*MODEL, "--data", str(self.text), "--steps", str(self.steps), "--log-every", "1000000")
        layout = ("--mesh", mesh, "--strategy", strategy, "--deadline", f"{self.deadline:g}")
        return ["train", *layout, *job, "--out", str(out), "--save-every", str(EVERY), *more]

    @cached_property
    def whole(self) -> Path:
        """The undisturbed run."""
        out = self.folder / "whole"
        child = self.start(self.words(out))
        if child.finish(PATIENCE) != 0:
            raise ValueError(f"a run without any fault fails here: {child.text()[-2000:]}")
        return out

    def same_run(self, out: Path) -> str:
        """Empty if a run's numbers and its last checkpoint are those of the undisturbed run, to the bit; else
        what differs."""
        mine, theirs = (_numbers(folder / "metrics.jsonl") for folder in (out, self.whole))
        if mine != theirs:
            steps = [step for step in theirs if mine.get(step) != theirs[step]]
            return f"{len(steps)} steps have other numbers, the first is {steps[0] if steps else [*mine][-1]}"
        name = f"step-{self.steps:06}"
        one, other = (Checkpoint.find(folder / CHECKPOINTS / name) for folder in (out, self.whole))
        found = [name for name, _ in differences(one, other) if "/" in name]
        return f"{len(found)} tensors of {name} differ, the first is {found[0]}" if found else ""


def lines_of(path: Path) -> list[Mapping[str, object]]:
    """The whole lines of a file of JSON objects, as far as it is written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _numbers(metrics: Path) -> dict[object, tuple[object, ...]]:
    return {line["step"]: tuple(line.get(name) for name in ("loss", "grad_norm", "lr")) for line in lines_of(metrics)}


def wait_for_step(metrics: Path, step: int, seconds: float, child: Observed) -> float | None:
    """When a run's metrics had this step; None if they had not by then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        lines = lines_of(metrics)
        if lines and int(str(lines[-1]["step"])) >= step:
            return time.monotonic()
        if child.process.poll() is not None:
            return None
        time.sleep(0.02)
    return None
