"""Which split of a model's links makes the shortest step, by simulation of the schedule that will run.

A stage that is dear is waited for once per bubble; a *rank* that is dear, with all its stages, is waited for all the
time.  The simulator knows both, and messages and V shapes besides, so it judges: starting from stages of equal cost,
boundaries move by one link as long as that makes the step shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from plait.core.actions import Schedule, keep, microbatches, owners
from plait.core.split import balanced
from plait.plan.simulate import Costs, simulate

MOST_MICROBATCHES = 4
"""So many microbatches for each stage show what a longer step would."""


def shortest_step(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> tuple[int, ...]:
    """How many links each stage should have.

    Args:
        schedule: with or without messages, proved.
        forward: seconds of each link.
        backward: the same; half of it is taken as the input part.

    Raises:
        ValueError: more stages than links.
    """
    num_stages = 1 + max(owners(schedule))
    shown = min(microbatches(a for line in schedule for a in line), MOST_MICROBATCHES * num_stages)
    schedule = keep(schedule, num_stages, shown)

    def seconds(sizes: tuple[int, ...]) -> float:
        ends = [sum(sizes[:stage]) for stage in range(num_stages + 1)]
        stages = [range(a, b) for a, b in pairwise(ends)]
        half = tuple(sum(backward[i] for i in links) / 2 for links in stages)
        costs = Costs(tuple(sum(forward[i] for i in links) for links in stages), half, half)
        return simulate(schedule, costs).makespan

    best = balanced([f + b for f, b in zip(forward, backward, strict=True)], num_stages)
    time = seconds(best)
    while True:
        found = min(((seconds(sizes), sizes) for sizes in _neighbours(best)), default=(time, best))
        if found[0] >= time:
            return best
        time, best = found


def _neighbours(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One link from a stage to another: beside it, or further on with all between moved along."""
    found = []
    for source, size in enumerate(sizes):
        for target in range(len(sizes)):
            if source != target and size > 1:
                changed = list(sizes)
                changed[source] -= 1
                changed[target] += 1
                found.append(tuple(changed))
    return found
