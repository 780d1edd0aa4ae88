"""The layers of each stage: a model is a chain of links, a stage is a run of them.

    links      embed  block block block block block block  norm head
    even       |------ 5 ------------| |------- 4 -----------|          by count
    balanced   |--------- 6 --------------| |------ 3 -------|          by measured cost: the head is heavy
    by hand    (5, 4)

Stages are contiguous, so that one activation goes from each to the next.

A costly stage is waited for once per bubble; a costly *rank*, with all its stages, all the time.  The simulator knows
both, so it decides in ``shortest_step``: from stages of equal cost, boundaries move by one link as long as that makes
the step shorter.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, permutations

from plait.schedule.actions import Schedule, check_sizes, count_microbatches, count_stages, keep
from plait.schedule.simulate import Costs, simulate

MOST_MICROBATCHES = 4
"""So many microbatches per stage show what a longer step would."""


def even(num_links: int, num_stages: int) -> tuple[range, ...]:
    """Stages of equally many links, or one more in the first ones; a ValueError for more stages than links."""
    _check(num_links, num_stages)
    each, more = divmod(num_links, num_stages)
    return by_sizes([each + (stage < more) for stage in range(num_stages)], num_links)


def by_sizes(sizes: Sequence[int], num_links: int) -> tuple[range, ...]:
    """Stages of the given numbers of links; a ValueError if those are not all there are, or a stage has none."""
    if sum(sizes) != num_links or min(sizes, default=0) < 1:
        raise ValueError(
            f"a split of {' + '.join(map(str, sizes)) or 'nothing'} = {sum(sizes)} links, but the model has "
            f"{num_links}: give each stage at least one, {num_links} together"
        )
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


def balanced(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Sizes of contiguous stages, from the cost of each link (in any unit), such that the most expensive stage costs as
    little as possible, and then the most even.

    Exact, by dynamic programming over (stages, links), twice: the least maximum, then the least sum of squares of all
    splits that keep to it.  (Not at once: the first stages of the best split may have a dearer one than they need, as
    long as a later one is dearer still.)  A ValueError for more stages than links, or a cost that is
    below 0 or not finite.
    """
    _check(len(costs), num_stages)
    for link, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"link {link} costs {cost}: no cost is below 0, and each is a finite number")
    upto = [0.0, *accumulate(costs)]
    dearest, _ = _best(upto, num_stages, lambda dearest, cost: max(dearest, cost), math.inf)
    _, sizes = _best(upto, num_stages, lambda squares, cost: squares + cost**2, dearest)
    return sizes


def _best(
    upto: Sequence[float], num_stages: int, join: Callable[[float, float], float], most: float
) -> tuple[float, tuple[int, ...]]:
    """(value, sizes) of the split with the least value among those without a stage that costs more than ``most``;
    ``join(value, cost)`` is the value with one stage more."""
    links = len(upto) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        ends = range(stage + 1, links - num_stages + stage + 2)
        found = {
            end: [
                (join(value, cost), (*sizes, end - start))
                for start, (value, sizes) in best.items()
                if start < end and (cost := upto[end] - upto[start]) <= most
            ]
            for end in ends
        }
        best = {end: min(values) for end, values in found.items() if values}
    return best[links]


# ---- by simulation ----------------------------------------------------------------------------------------


def shortest_step(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> tuple[int, ...]:
    """The best number of links of each stage of a proved schedule; a ValueError for more stages than links.

    ``forward`` and ``backward`` are seconds of each link; half of the backward is taken as its input part.
    """
    num_stages = count_stages(schedule)
    shown = min(count_microbatches(schedule), MOST_MICROBATCHES * num_stages)
    schedule = keep(schedule, num_stages, shown)

    def seconds(sizes: tuple[int, ...]) -> float:
        stages = by_sizes(sizes, len(forward))
        half = tuple(sum(backward[i] for i in links) / 2 for links in stages)
        costs = Costs(tuple(sum(forward[i] for i in links) for links in stages), half, half)
        return simulate(schedule, costs).makespan

    best = balanced([f + b for f, b in zip(forward, backward, strict=True)], num_stages)
    time = seconds(best)
    while True:
        shorter, sizes = min(((seconds(sizes), sizes) for sizes in _neighbours(best)), default=(time, best))
        if shorter >= time:
            return best
        time, best = shorter, sizes


def _neighbours(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the splits with one link moved to another stage: a neighbour, or further with all between moved along."""
    return [
        tuple(size - (stage == source) + (stage == target) for stage, size in enumerate(sizes))
        for source, target in permutations(range(len(sizes)), 2)
        if sizes[source] > 1
    ]


def _check(num_links: int, num_stages: int) -> None:
    check_sizes(num_stages, num_microbatches=1)
    if num_stages > num_links:
        raise ValueError(
            f"{num_stages} stages, but the model has {num_links} links to give them: use at most {num_links} stages, "
            f"or a model of more layers"
        )
