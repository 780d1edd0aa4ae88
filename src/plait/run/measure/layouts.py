"""Trains layouts for a few steps, and shows their times and bytes with the planner's predictions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from rich.table import Table

from plait.predict.footprint import footprints
from plait.predict.search import Candidate
from plait.predict.sent import messages
from plait.run.report.plans import gb, settings_of
from plait.run.report.screen import empty_table

STEPS, LEFT_OUT = 8, 3
"""The number of steps of a short run, and of its first ones, in which caches fill."""
LONGEST = 600.0
"""Seconds after which a short run is ended."""


class ShortRun(NamedTuple):
    """The results of a short run: seconds of a step, and bytes of the rank that has most."""

    seconds: float
    held: int
    sent: int


def measure_layout(toml: str) -> ShortRun:
    """Trains with the settings of a file's text.  Raises ValueError with the last lines of a run that fails."""
    with tempfile.TemporaryDirectory() as folder:
        file, result = Path(folder) / "layout.toml", Path(folder) / "result.json"
        file.write_text(toml)
        words = ["train", "--config", str(file), "--steps", str(STEPS), "--log-every", "1000", "--json", str(result)]
        try:
            run = subprocess.run(
                [sys.executable, "-m", "plait", *words], capture_output=True, text=True, timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"a run of {STEPS} steps took more than {LONGEST:.0f} s") from None
        if run.returncode:
            raise ValueError(f"a run of {STEPS} steps ended with code {run.returncode}: {run.stderr[-600:].strip()}")
        found = json.loads(result.read_text())
    ranks = found["bytes_per_rank"]
    return ShortRun(
        median(line["seconds"] for line in found["metrics"][LEFT_OUT:]),
        max(sum(rank["measured"].values()) for rank in ranks),
        max(rank["sent_measured"] for rank in ranks),
    )


class MeasuredPlan(NamedTuple):
    """A plan, and a short run of it."""

    said: Candidate
    run: ShortRun

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        return self.said.duration.total / self.run.seconds - 1

    @property
    def state(self) -> float:
        """Predicted bytes between steps on the rank that has most."""
        return max(one.state for one in footprints(self.said.plan))

    @property
    def sent(self) -> float:
        """Predicted bytes that the rank that sends most sends in a step."""
        plan = self.said.plan
        return max(sum(line.bytes for line in messages(plan, share)) for share in set(plan.shares))

    def as_json(self) -> dict[str, Any]:
        return {
            **settings_of(self.said.plan),
            "seconds": [self.said.duration.total, self.run.seconds],
            "state": [self.state, self.run.held],
            "sent": [self.sent, self.run.sent],
        }


def measured_table(found: Sequence[MeasuredPlan]) -> Table:
    """Memory against communication: each layout's bytes held and sent and its seconds, predicted and measured."""
    heads = ("mesh", "row", "micro-\nb", "said\ns/step", "ran\ns/step", "error")
    sizes = ("said\nstate", "ran\nstate", "said\nsent", "ran\nsent")
    table = empty_table("", *heads, *sizes, left=("mesh", "row"), padding=(0, 1, 0, 0), pad_edge=False)
    for one in found:
        plan, run = one.said.plan, one.run
        table.add_row(
            str(plan.mesh),
            plan.strategy.name,
            str(plan.microbatches),
            f"{one.said.duration.total:.3g}",
            f"{run.seconds:.3g}",
            f"{one.error:+.0%}",
            *map(gb, (one.state, run.held, one.sent, run.sent)),
        )
    return table


def errors_text(found: Sequence[MeasuredPlan]) -> str:
    """The mean error, and the distance of the predicted fastest layout from the fastest."""
    first = min(found, key=lambda one: one.said.duration.total)
    best = min(one.run.seconds for one in found)
    mean = fmean(abs(one.error) for one in found)
    return f"mean error {mean:.1%}; the layout said to be fastest takes {first.run.seconds / best:.2f} x the fastest"
