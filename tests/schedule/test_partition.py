"""Cuts: even, every link once and the larger stages first; balanced, against every cut there is; by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedule.partition import balanced, by_sizes, even


def test_sixteen_links_on_five_stages() -> None:
    assert even(16, 5) == (range(0, 4), range(4, 7), range(7, 10), range(10, 13), range(13, 16))


@pytest.mark.parametrize("num_links", [1, 2, 7, 16])
def test_every_link_once_and_larger_stages_first(num_links: int) -> None:
    for num_stages in range(1, num_links + 1):
        cut = even(num_links, num_stages)
        assert [link for links in cut for link in links] == list(range(num_links))
        sizes = [len(links) for links in cut]
        assert len(sizes) == num_stages and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("links", "stages", "words"), [(16, 17, "17 stages, .* 16 links .*at most 16"), (3, 0, "0 stages: .*at least one")]
)
def test_a_stage_has_a_link(links: int, stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        even(links, stages)


def splits(num_links: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut links in that many stages."""
    for cuts in combinations(range(1, num_links), num_stages - 1):
        ends = (0, *cuts, num_links)
        yield tuple(b - a for a, b in pairwise(ends))


def stage_costs(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    return [sum(costs[i] for i in links) for links in by_sizes(sizes, len(costs))]


def test_a_dearer_start_may_be_the_more_even_whole() -> None:
    costs = [3, 5, 3, 7, 2, 7, 2]
    each = stage_costs(costs, balanced(costs, 5))
    assert (max(each), sum(cost**2 for cost in each)) == (9, 205)


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_balanced_against_every_split_there_is(costs: list[int], data: st.DataObject) -> None:
    """The dearest stage is as cheap as any split has it; among those, the sum of squares is the least."""
    num_stages = data.draw(st.integers(1, len(costs)))

    def value(sizes: tuple[int, ...]) -> tuple[float, float]:
        each = stage_costs(costs, sizes)
        return max(each), sum(cost**2 for cost in each)

    assert (
        max(stage_costs(costs, balanced(costs, num_stages))) == min(value(s) for s in splits(len(costs), num_stages))[0]
    )
    assert value(balanced(costs, num_stages)) == min(value(s) for s in splits(len(costs), num_stages))


@pytest.mark.parametrize(
    ("costs", "stages", "sizes"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 1, 4], 3, (4, 4, 1)),
        ([9, 1, 1, 1], 3, (1, 2, 1)),
        ([1, 1, 1, 9], 2, (3, 1)),
        ([0, 0, 0], 3, (1, 1, 1)),
        ([0.5], 1, (1,)),
        ([2, 3, 4], 1, (3,)),
    ],
)
def test_balanced_as_drawn(costs: list[float], stages: int, sizes: tuple[int, ...]) -> None:
    found = balanced(costs, stages)
    assert max(stage_costs(costs, found)) == max(stage_costs(costs, sizes))
    assert sorted(stage_costs(costs, found)) == sorted(stage_costs(costs, sizes))
    assert len(found) == stages and sum(found) == len(costs)


@pytest.mark.parametrize(
    ("costs", "stages", "words"),
    [
        ([1.0, 1.0], 3, "3 stages, but the model has 2 links"),
        ([1.0], 0, "0 stages: a pipeline has at least one"),
        ([], 1, "1 stages, but the model has 0 links"),
        ([1.0, -0.5, 2.0], 2, "link 1 costs -0.5: no cost is below 0, and each is a finite number"),
        ([1.0, math.nan, -1.0], 2, "link 1 costs nan: no cost is below 0, and each is a finite number"),
        ([math.nan], 1, "link 0 costs nan"),
        ([1.0, 2.0, math.inf], 2, "link 2 costs inf"),
        ([-math.inf, 2.0], 2, "link 0 costs -inf"),
    ],
)
def test_balanced_refuses(costs: list[float], stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balanced(costs, stages)


def test_by_sizes() -> None:
    assert by_sizes([1, 3, 2], 6) == (range(0, 1), range(1, 4), range(4, 6))
    assert by_sizes((6,), 6) == (range(6),)


@pytest.mark.parametrize(
    ("sizes", "links", "words"),
    [
        ([1, 3], 6, r"a split of 1 \+ 3 = 4 links, but the model has 6"),
        ([4, 3], 6, r"4 \+ 3 = 7 links"),
        ([6, 0], 6, r"6 \+ 0 = 6 links.* give each stage at least one, 6 together"),
        ([7, -1], 6, r"7 \+ -1 = 6"),
        ([], 6, "a split of nothing = 0 links"),
    ],
)
def test_by_sizes_refuses(sizes: list[int], links: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        by_sizes(sizes, links)
