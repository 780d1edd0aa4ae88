"""plait's side, and its peers: the one module of this benchmark that knows plait.

The model, the optimizer, the batch and the split are the peers'; the word ``schedule`` names the order. While plait
cannot be imported its rows are left out and the reason is printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

from harness.contestants import SHARED, TRANSPORTS, Build, Contestant, adamw, comm_beside
from harness.models import Workload
from harness.report import Match
from models import microbatches
from splits import Placement, SplitName, loop, sizes_of, twice, v

if TYPE_CHECKING:
    from plait.step import Engine

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "gpipe": loop,
    "1f1b": loop,
    "zb_h1": loop,
    "zb_h2": loop,
    "interleaved": twice,
    "zbv": v,
    "dualpipe_v": v,
}
"""The schedules that run; ``naive`` is left out, it is one process with messages."""


BEST_GOAL = {"plait": 1.0, SHARED: 1.05}
"""Our best order over torch's, with any split."""


def matches(seconds: dict[str, list[float]]) -> tuple[Match, ...]:
    """Each schedule against torch's of the same name and split."""
    found = []
    for name in seconds:
        who, _, what = name.partition("-")
        if who in TRANSPORTS:
            found.append(Match(name, (f"torch-{what}",), {}))
    return tuple(found)


def best_matches(seconds: dict[str, list[float]]) -> tuple[Match, ...]:
    """Our fastest, over each transport, against all of torch's: with each split, and with any split."""

    def of(who: str, split: str) -> tuple[str, ...]:
        return tuple(n for n in seconds if n.startswith(f"{who}-") and n.endswith(split))

    found = []
    for split, who in product(("-even", "-balanced", ""), TRANSPORTS):
        if ours := of(who, split):
            best = min(ours, key=lambda name: statistics.median(seconds[name]))
            goal = {"gpt256": BEST_GOAL[who]} if who in BEST_GOAL and not split else {}
            words = f" order{f', {split[1:]} split' if split else ''}"
            found.append(Match(best, of("torch", split), goal, f"torch's best{words}", f"{who}, best{words}"))
    return tuple(found)


def rows(splits: Sequence[SplitName], costs: Sequence[float]) -> tuple[dict[str, Build], str]:
    """plait's contestants by name, and why there are none ("" if there are); ``costs`` of the links, which balance."""
    try:
        from plait.step import Engine  # noqa: F401
    except ImportError as reason:
        return {}, f"{reason}"
    ours = {
        f"{who}-{name}-{split}": _row(name, split, costs, who)
        for who in TRANSPORTS
        for name in PLACEMENTS
        for split in splits
    }
    return ours, ""


def engine_for(
    workload: Workload,
    ranks: int,
    schedule: str,
    split: SplitName,
    costs: Sequence[float],
    who: str = "plait",
) -> Engine:
    """A rank's engine, on the process group that all contestants share."""
    from plait.step import Engine
    from plait.table.mesh import Mesh

    model = workload.build()
    return Engine(
        model,
        comm_beside(Mesh(pipe=ranks), f"{workload.name} {schedule} {split} {who}", shared_memory=who == SHARED),
        strategy="ddp",
        optimizer=adamw(model.parameters(), workload.learning_rate),
        loss_fn=workload.loss_sum,
        count_fn=workload.count,
        schedule=schedule,
        split=sizes_of(split, costs, PLACEMENTS[schedule](ranks)),
    )


def _row(schedule: str, split: SplitName, costs: Sequence[float], who: str) -> Build:
    def build(workload: Workload, ranks: int) -> Contestant:
        engine = engine_for(workload, ranks, schedule, split, costs, who)
        return Contestant(lambda batch: engine.step(microbatches(batch)).loss, loss_is_global=True)

    return build
