"""plait's side, and what it is held against: the one module of this benchmark that knows plait.

The model, the optimizer, the batch and the split are the peers'; the word ``schedule`` names the order. While plait
cannot be imported its rows are left out and the reason is printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from harness.contestants import Build, Contestant, adamw, comm_beside
from harness.models import Workload
from harness.report import Match
from models import microbatches
from splits import Placement, SplitName, loop, sizes_of, twice, v

if TYPE_CHECKING:
    from plait.engine import Engine

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


def matches(seconds: dict[str, list[float]]) -> tuple[Match, ...]:
    """Each schedule against torch's of the same name, with the same split."""
    return tuple(Match(name, (f"torch-{name.removeprefix('plait-')}",), {}) for name in seconds if "plait-" in name)


def best_matches(seconds: dict[str, list[float]]) -> tuple[Match, ...]:
    """Our fastest against all of torch's: with each split, and whatever the split."""
    found = []
    for split in ("-even", "-balanced", ""):
        theirs, ours = ([n for n in seconds if n.startswith(who) and n.endswith(split)] for who in ("torch-", "plait-"))
        if ours:
            best = min(ours, key=lambda name: statistics.median(seconds[name]))
            found.append(Match(best, tuple(theirs), {}))
    return tuple(found)


def by_stage(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """The split that plait's users get from costs: the dearest stage is cheapest, whichever rank has it."""
    from plait.core.split import balanced

    return balanced(costs, num_stages)


def rows(splits: Sequence[SplitName], costs: Sequence[float]) -> tuple[dict[str, Build], str]:
    """plait's contestants by name, and why there are none ("" if there are); ``costs`` of the links, which balance."""
    try:
        from plait.engine import Engine  # noqa: F401
    except ImportError as reason:
        return {}, f"{reason}"
    return {f"plait-{name}-{split}": _row(name, split, costs) for name in PLACEMENTS for split in splits}, ""


def engine_for(workload: Workload, ranks: int, schedule: str, split: SplitName, costs: Sequence[float]) -> Engine:
    """A rank's engine, on the process group that all contestants share."""
    from plait.core.mesh import Mesh
    from plait.engine import Engine

    model = workload.build()
    return Engine(
        model,
        comm_beside(Mesh(pipe=ranks), f"{workload.name} {schedule} {split}"),
        strategy="ddp",
        optimizer=adamw(model.parameters(), workload.learning_rate),
        loss_fn=workload.loss_sum,
        count_fn=workload.count,
        schedule=schedule,
        split=sizes_of(split, costs, PLACEMENTS[schedule](ranks)),
    )


def _row(schedule: str, split: SplitName, costs: Sequence[float]) -> Build:
    def build(workload: Workload, ranks: int) -> Contestant:
        engine = engine_for(workload, ranks, schedule, split, costs)
        return Contestant(lambda batch: engine.step(microbatches(batch)).loss, loss_is_global=True)

    return build
