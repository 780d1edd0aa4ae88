"""Turns the log of a step into the simulator's terms: a timeline, and the costs that predict it.

    log                                  measured_timeline            measured_costs
    rank 1  |.....0.3 s.....|#0.2 s#|    1F0 from 0.3 to 0.5          forward of stage 1: the median of such 0.2 s

``simulate(schedule, measured_costs(logs))`` then predicts the step from the order and the costs of its actions alone;
``idle.py`` names the rest of the measured time.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from plait.schedule.actions import PASSES, Event, Kind, Log, Schedule, awaits, count_stages, owners
from plait.schedule.simulate import COLLECTIVES, COSTED, Costs, Timeline


def schedule_of(log: Log) -> Schedule:
    """The actions in a log."""
    return tuple(tuple(event.action for event in line) for line in log)


def measured_timeline(log: Log) -> Timeline:
    """Start and end of each action in a log, in seconds from the start of the step.  A pass starts when all its waiting
    is over, so its length is its computation; a wait inside a pass is moved before it."""
    return Timeline(
        schedule_of(log),
        tuple(tuple(e.end - e.busy if e.action.kind in PASSES else e.start for e in line) for line in log),
        tuple(tuple(e.end for e in line) for line in log),
    )


def measured_costs(logs: Sequence[Log]) -> Costs:
    """The costs of each stage's actions in these steps: medians over microbatches and steps, in seconds.

    Passes and updates count without their waits.  Gathers and reductions count whole, because waiting for the same
    stage in other pipelines is their cost, plus the passes' waits for collectives (``collectives_inside``).  In a
    stage that has only full backwards, each part costs half of one.  Costs that a log lacks (messages, activations,
    overlap) are as in ``Costs()``.  The steps have one schedule; leave out the first ones, in which caches fill.
    """
    took: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for event in (event for log in logs for line in log for event in line):
        kind, stage = event.action.kind, event.action.stage
        took[kind, stage].append(event.end - event.start if kind in COLLECTIVES else event.busy)
    medians = {key: median(seconds) for key, seconds in took.items()}
    inside = [collectives_inside(log) for log in logs]
    for key in {key for step in inside for key in step}:
        medians[key] += median(step.get(key, 0.0) for step in inside)
    stages = range(count_stages(schedule_of(logs[0])))
    for stage in stages:
        parts = (Kind.INPUT, stage), (Kind.WEIGHT, stage)
        if not all(part in medians for part in parts):
            medians |= dict.fromkeys(parts, medians[Kind.BACKWARD, stage] / 2)
    costs: dict[str, Any] = {k.name.lower(): tuple(medians.get((k, s), 0.0) for s in stages) for k in COSTED}
    return Costs(**costs)


def collectives_inside(log: Log) -> dict[tuple[Kind, int], float]:
    """Seconds that passes of a step waited for collectives, by the (kind, stage) of the action that they count to.

    A stage's units are gathered and reduced while its passes run, so their actions may take no time at all.  The waits
    of a forward or an input part count to the stage's UNSHARD, those of a backward or a weight part to its REDUCE_GRAD,
    or to its REDUCE if there is none, in equal parts.
    """
    schedule = schedule_of(log)
    owner, num_stages = owners(schedule), count_stages(schedule)
    times = Counter((a.kind, a.stage) for line in schedule for a in line)
    inside: dict[tuple[Kind, int], float] = defaultdict(float)
    for rank, line in enumerate(log):
        for event in line:
            kind, stage = event.action.kind, event.action.stage
            if kind not in PASSES:
                continue
            first = Kind.UNSHARD if kind in (Kind.FORWARD, Kind.INPUT) else Kind.REDUCE_GRAD
            key = next((k for k in ((first, stage), (Kind.REDUCE, stage)) if times[k]), None)
            _, waited = waits_of_pass(event, rank, owner, num_stages)
            if key is not None and waited:
                inside[key] += waited / times[key]
    return dict(inside)


def waits_of_pass(event: Event, rank: int, owner: Mapping[int, int], num_stages: int) -> tuple[float, float]:
    """Seconds that a pass waited for its message, which it waits for first, and for collectives."""
    message = awaits(event.action, num_stages)
    comes = message is not None and owner.get(message.stage, rank) != rank
    waits = [span.end - span.start for span in event.waits]
    first = sum(waits[:1]) if comes else 0.0
    return first, sum(waits[1:] if comes else waits)
