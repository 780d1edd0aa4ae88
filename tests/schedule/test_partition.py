"""Cuts: even, every link once and the larger stages first; balanced and by simulation, against every cut there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedule.orders import ORDERS, stages_per_rank, write_order
from plait.schedule.partition import balanced, by_sizes, even, shortest_step
from plait.schedule.simulate import Costs, simulate


def splits(num_links: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut links in that many stages."""
    for cuts in combinations(range(1, num_links), num_stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, num_links)))


def stage_costs(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    return [sum(costs[i] for i in links) for links in by_sizes(sizes, len(costs))]


def test_as_drawn() -> None:
    assert even(16, 5) == (range(0, 4), range(4, 7), range(7, 10), range(10, 13), range(13, 16))
    assert by_sizes([1, 3, 2], 6) == (range(0, 1), range(1, 4), range(4, 6))
    assert by_sizes((6,), 6) == (range(6),)
    for costs, stages, sizes in (
        ([1, 1, 1, 1, 1, 1, 1, 1, 4], 3, (4, 4, 1)),
        ([9, 1, 1, 1], 3, (1, 2, 1)),
        ([1, 1, 1, 9], 2, (3, 1)),
        ([0, 0, 0], 3, (1, 1, 1)),
        ([0.5], 1, (1,)),
        ([2, 3, 4], 1, (3,)),
    ):
        found = balanced(costs, stages)
        assert sorted(stage_costs(costs, found)) == sorted(stage_costs(costs, sizes)) and len(found) == stages


@pytest.mark.parametrize("num_links", [1, 2, 7, 16])
def test_every_link_once_and_larger_stages_first(num_links: int) -> None:
    for num_stages in range(1, num_links + 1):
        cut = even(num_links, num_stages)
        assert [link for links in cut for link in links] == list(range(num_links))
        sizes = [len(links) for links in cut]
        assert len(sizes) == num_stages and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def balance(costs: Sequence[float], num_stages: int) -> tuple[float, float]:
    """The dearest stage and the sum of squares of the split that is found, which no other split is below."""

    def value(sizes: tuple[int, ...]) -> tuple[float, float]:
        each = stage_costs(costs, sizes)
        return max(each), sum(cost**2 for cost in each)

    found = value(balanced(costs, num_stages))
    assert found == min(map(value, splits(len(costs), num_stages)))
    return found


def test_a_dearer_start_may_be_the_more_even_whole() -> None:
    assert balance([3, 5, 3, 7, 2, 7, 2], 5) == (9, 205)


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_balanced_against_every_split_there_is(costs: list[int], data: st.DataObject) -> None:
    balance(costs, data.draw(st.integers(1, len(costs))))


NO_COST = "no cost is below 0, and each is a finite number"


@pytest.mark.parametrize(
    ("cut", "given", "stages", "words"),
    [
        (even, 16, 17, "17 stages, .* 16 links .*at most 16"),
        (even, 3, 0, "0 stages: .*at least one"),
        (balanced, [1.0, 1.0], 3, "3 stages, but the model has 2 links"),
        (balanced, [1.0], 0, "0 stages: a pipeline has at least one"),
        (balanced, [], 1, "1 stages, but the model has 0 links"),
        (balanced, [1.0, -0.5, 2.0], 2, f"link 1 costs -0.5: {NO_COST}"),
        (balanced, [1.0, math.nan, -1.0], 2, f"link 1 costs nan: {NO_COST}"),
        (balanced, [math.nan], 1, "link 0 costs nan"),
        (balanced, [1.0, 2.0, math.inf], 2, "link 2 costs inf"),
        (balanced, [-math.inf, 2.0], 2, "link 0 costs -inf"),
        (by_sizes, [1, 3], 6, r"a split of 1 \+ 3 = 4 links, but the model has 6"),
        (by_sizes, [4, 3], 6, r"4 \+ 3 = 7 links"),
        (by_sizes, [6, 0], 6, r"6 \+ 0 = 6 links.* give each stage at least one, 6 together"),
        (by_sizes, [7, -1], 6, r"7 \+ -1 = 6"),
        (by_sizes, [], 6, "a split of nothing = 0 links"),
    ],
)
def test_refusals(cut: Callable[..., Any], given: Any, stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut(given, stages)


# ---- the shortest step ------------------------------------------------------------------------------------

FORWARD = (0.1, 1.0, 1.1, 0.9, 1.0, 1.2, 0.2, 2.1)
BACKWARD = (0.2, 2.0, 2.1, 2.2, 1.9, 2.0, 0.3, 4.0)


def makespan(order: str, sizes: tuple[int, ...], num_microbatches: int) -> float:
    half = tuple(cost / 2 for cost in stage_costs(BACKWARD, sizes))
    costs = Costs(tuple(stage_costs(FORWARD, sizes)), half, half)
    return simulate(write_order(order, len(sizes), num_microbatches), costs).makespan


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_split_is_much_faster(order: str, ranks: int) -> None:
    """Moving one link at a time may end beside the best split of all, but not far from it."""
    num_stages = ranks * stages_per_rank(order)
    found = shortest_step(write_order(order, num_stages, 6), FORWARD, BACKWARD)
    times = {sizes: makespan(order, sizes, 6) for sizes in splits(len(FORWARD), num_stages)}
    assert times[found] <= 1.05 * min(times.values())


@pytest.mark.parametrize("order", ["zbv", "interleaved"])
def test_a_rank_with_two_stages_is_judged_as_a_rank(order: str) -> None:
    """In a V the last stage is beside the first: a dear head wants few links at both ends."""
    found = shortest_step(write_order(order, 4, 8), FORWARD, BACKWARD)
    assert makespan(order, found, 8) < makespan(order, (2, 2, 2, 2), 8)


def test_a_step_of_many_microbatches_is_judged_by_a_few() -> None:
    many, few = (shortest_step(write_order("1f1b", 2, m), FORWARD, BACKWARD) for m in (4000, 8))
    assert many == few
    with pytest.raises(ValueError, match="4 stages, but the model has 3 links"):
        shortest_step(write_order("1f1b", 4, 2), (1.0,) * 3, (1.0,) * 3)
