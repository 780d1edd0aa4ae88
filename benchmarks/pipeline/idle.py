"""The idle share of every schedule, measured, and simulated from the measured stage costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from models import WORKLOADS, microbatches
from ours import PLACEMENTS, engine_for
from splits import SplitName

WARM_UP, STEPS = 2, 5
"""Steps before, and steps of which the typical one is taken (plait remembers five)."""


def idle_task(model: str, split: SplitName, costs: Sequence[float]) -> dict[str, dict[str, Any]]:
    """On every rank: a few steps under each schedule; shares of the typical step, on rank 0."""
    from plait.run.report.idle import idle_times
    from plait.run.report.measured import measured_timeline
    from plait.run.train.timeline import EventLog, record_timeline

    workload = WORKLOADS[model]
    batches = [workload.batch(step, 0, 1) for step in range(2)]
    found = {}
    for schedule in PLACEMENTS:
        engine = engine_for(workload, dist.get_world_size(), schedule, split, costs)
        log = EventLog(engine)
        for step in range(WARM_UP + STEPS):
            engine.step(microbatches(batches[step % 2]))
        recorded = record_timeline(engine, log)
        if recorded is None:
            continue
        measured, simulated = recorded.idle
        found[schedule] = {
            "milliseconds": 1e3 * measured_timeline(recorded.typical).makespan,
            "simulated milliseconds": 1e3 * recorded.simulated.makespan,
            "idle": measured,
            "simulated idle": simulated,
            "busy": recorded.busy,
            "parts": [one.shares for one in idle_times(recorded.typical)],
        }
    return found


def print_idle(found: dict[str, dict[str, Any]]) -> None:
    """A line for each schedule: the difference is the prediction's error."""
    print("\n| schedule | step, ms | simulated, ms | idle | simulated | points apart | busy, by rank | communication |")
    print("|---|---|---|---|---|---|---|---|")
    for name, one in found.items():
        busy = ", ".join(f"{share:.1%}" for share in one["busy"])
        talk = ", ".join(f"{parts['communication']:.1%}" for parts in one["parts"])
        apart = 100 * (one["idle"] - one["simulated idle"])
        print(
            f"| {name} | {one['milliseconds']:.0f} | {one['simulated milliseconds']:.0f} | {one['idle']:.1%} | "
            f"{one['simulated idle']:.1%} | {apart:+.1f} | {busy} | {talk} |"
        )
