"""A step over time as boxes on lanes: one lane of each rank for computing, one for gathers, reductions and waits.

box    [kind, stage, microbatch, start, end], in seconds from the start of the step; kinds are places in ``KINDS``
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plait.predict.duration import pipe_seconds, rank_passes, update_seconds
from plait.predict.plan import Plan
from plait.predict.sent import row_seconds
from plait.run.report.measured import measured_timeline
from plait.schedule.actions import MESSAGES, PASSES, Kind, Log
from plait.schedule.passes import add_step
from plait.schedule.pipeline import Pipeline
from plait.schedule.simulate import COLLECTIVES, Costs, Timeline, simulate

KINDS = ("forward", "backward", "input part", "weight part", "update", "gather", "reduction", "other")
FORWARD, BACKWARD, INPUT, WEIGHT, UPDATE, GATHER, REDUCTION, OTHER = range(len(KINDS))
CODES = {
    Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.INPUT: INPUT, Kind.WEIGHT: WEIGHT, Kind.UPDATE: UPDATE,
    Kind.UNSHARD: GATHER, Kind.REDUCE: REDUCTION, Kind.REDUCE_GRAD: REDUCTION,
}  # fmt: skip

Box = list[float]
MOST_DRAWN = 1 << 13
"""The largest number of passes in a planned step that is drawn."""


def box(kind: int, stage: int, microbatch: int, start: float, end: float) -> Box:
    """A box; its times have six digits."""
    return [kind, stage, microbatch, float(f"{start:.6g}"), float(f"{end:.6g}")]


def lane(name: str, compute: Iterable[Box], messages: Iterable[Box]) -> dict[str, Any]:
    """The lanes of a rank, without boxes that take no time."""
    last = [[one for one in boxes if one[4] > one[3]] for boxes in (compute, messages)]
    return {"name": name, **dict(zip(("compute", "messages"), last, strict=True))}


def timeline_lanes(timeline: Timeline) -> list[dict[str, Any]]:
    lanes = []
    for rank in range(len(timeline.schedule)):
        boxes = [
            box(CODES.get(action.kind, OTHER), action.stage, action.microbatch, start, end)
            for action, start, end in timeline.line(rank)
        ]
        sent = [one for one in boxes if one[0] in (GATHER, REDUCTION, OTHER)]
        lanes.append(lane(f"rank {rank}", [one for one in boxes if one[0] <= UPDATE], sent))
    return lanes


def measured_lanes(log: Log) -> list[dict[str, Any]]:
    """The lanes of a measured step.  Waits inside passes are boxes on the lane of messages."""
    lanes, timeline = [], measured_timeline(log)
    for rank, line in enumerate(log):
        compute, sent = [], []
        for event, (action, start, end) in zip(line, timeline.line(rank), strict=True):
            place = action.stage, action.microbatch
            if action.kind in PASSES or action.kind is Kind.UPDATE:
                compute.append(box(CODES[action.kind], *place, start, end))
            if action.kind in COLLECTIVES | MESSAGES:
                sent.append(box(CODES.get(action.kind, OTHER), *place, event.start, event.end))
                continue
            for wait in event.waits:
                code = GATHER if "gather" in wait.what else REDUCTION if "reduce" in wait.what else OTHER
                sent.append(box(code, *place, wait.start, wait.end))
        lanes.append(lane(f"rank {rank}", compute, sent))
    return lanes


def planned_lanes(plan: Plan) -> list[dict[str, Any]] | None:
    """The lanes of a planned step for the ranks of one pipeline; None for more than ``MOST_DRAWN`` passes.

    A pass takes as long as its computation, or its concurrent messages if they take longer, as ``duration`` counts.
    """
    m, per_rank = plan.microbatches, plan.stages_per_rank
    if m * per_rank * plan.mesh.pipe > MOST_DRAWN:
        return None
    pipeline = Pipeline(plan.order, plan.mesh.pipe, plan.chunks)
    shares = [plan.shares[pipeline.owner[stage]] for stage in range(pipeline.num_stages)]
    costs: dict[str, list[float]] = {name: [] for name in ("forward", "half", "reduce", "update")}
    once = plan.mesh.pipe > 1 and per_rank == 1  # the only stage of a rank is gathered once
    beside = []
    for share in shares:
        there, back = (one.total / per_rank for one in rank_passes(plan, share))
        took = {phase: seconds / per_rank for phase, seconds in row_seconds(plan, share).items()}
        gather, reduction = took["forward"] / (1 if once else m), (took["backward"] + took["microbatch"]) / m
        beside.append((gather, reduction))
        costs["forward"].append(max(there, 0.0 if once else gather) if plan.overlap else there + gather)
        costs["half"].append((max(back, reduction) if plan.overlap else back + reduction) / 2)
        costs["reduce"].append(max(took["step"] - back, 0.0) if plan.overlap else took["step"])
        costs["update"].append((update_seconds(plan, share) + took["publish"]) / per_rank)
    forward, half, reduce, update = (tuple(costs[name]) for name in ("forward", "half", "reduce", "update"))
    timeline = simulate(
        add_step(pipeline.written(m)),
        Costs(forward, half, half, latency=pipe_seconds(plan), reduce=reduce, update=update),
    )
    lanes = timeline_lanes(timeline)
    for rank, one in enumerate(lanes):
        one["messages"] += _beside(timeline, rank, beside, once=once)
    return lanes


def _beside(timeline: Timeline, rank: int, beside: list[tuple[float, float]], *, once: bool) -> list[Box]:
    """The gathers and reductions that run during a rank's passes, each from the start of its pass."""
    found, gathered = [], set()
    for action, start, _ in timeline.line(rank):
        gather, reduction = beside[action.stage]
        if action.kind is Kind.FORWARD and gather and not (once and action.stage in gathered):
            gathered.add(action.stage)
            found.append(box(GATHER, action.stage, action.microbatch, start, start + gather))
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT) and reduction:
            found.append(box(REDUCTION, action.stage, action.microbatch, start, start + reduction))
    return found
