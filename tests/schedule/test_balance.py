"""The split that makes the shortest step: against every other split there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from plait.schedule.orders import ORDERS, stages_per_rank, write_order
from plait.schedule.partition import shortest_step
from plait.schedule.simulate import Costs, simulate

FORWARD = (0.1, 1.0, 1.1, 0.9, 1.0, 1.2, 0.2, 2.1)
BACKWARD = (0.2, 2.0, 2.1, 2.2, 1.9, 2.0, 0.3, 4.0)


def makespan(order: str, sizes: tuple[int, ...], num_microbatches: int) -> float:
    ends = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    forward = tuple(sum(FORWARD[a:b]) for a, b in pairwise(ends))
    half = tuple(sum(BACKWARD[a:b]) / 2 for a, b in pairwise(ends))
    return simulate(write_order(order, len(sizes), num_microbatches), Costs(forward, half, half)).makespan


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_split_is_much_faster(order: str, ranks: int) -> None:
    """Moving one link at a time may end beside the best split of all, but not far from it."""
    num_stages = ranks * stages_per_rank(order)
    found = shortest_step(write_order(order, num_stages, 6), FORWARD, BACKWARD)
    assert len(found) == num_stages and sum(found) == len(FORWARD) and min(found) >= 1
    cuts = combinations(range(1, len(FORWARD)), num_stages - 1)
    every = [tuple(b - a for a, b in pairwise((0, *cut, len(FORWARD)))) for cut in cuts]
    times = {sizes: makespan(order, sizes, 6) for sizes in every}
    assert times[found] <= 1.05 * min(times.values())


def test_a_rank_with_two_stages_is_judged_as_a_rank() -> None:
    """In a V the last stage stands beside the first: a dear head wants few links at both ends."""
    v = shortest_step(write_order("zbv", 4, 8), FORWARD, BACKWARD)
    loop = shortest_step(write_order("interleaved", 4, 8), FORWARD, BACKWARD)
    for order, sizes in (("zbv", v), ("interleaved", loop)):
        assert makespan(order, sizes, 8) < makespan(order, (2, 2, 2, 2), 8)


def test_a_step_of_many_microbatches_is_judged_by_a_few() -> None:
    many, few = (shortest_step(write_order("1f1b", 2, m), FORWARD, BACKWARD) for m in (4000, 8))
    assert many == few


def test_fewer_links_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="4 stages, but the model has 3 links"):
        shortest_step(write_order("1f1b", 4, 2), (1.0,) * 3, (1.0,) * 3)
