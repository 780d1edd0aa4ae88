"""Cuts: even, every link once and the larger stages first; by hand; and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.schedule.partition import by_sizes, even


def test_as_drawn() -> None:
    assert even(16, 5) == (range(0, 4), range(4, 7), range(7, 10), range(10, 13), range(13, 16))
    assert by_sizes([1, 3, 2], 6) == (range(0, 1), range(1, 4), range(4, 6))
    assert by_sizes((6,), 6) == (range(6),)


@pytest.mark.parametrize("num_links", [1, 2, 7, 16])
def test_every_link_once_and_larger_stages_first(num_links: int) -> None:
    for num_stages in range(1, num_links + 1):
        cut = even(num_links, num_stages)
        assert [link for links in cut for link in links] == list(range(num_links))
        sizes = [len(links) for links in cut]
        assert len(sizes) == num_stages and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("cut", "given", "stages", "words"),
    [
        (even, 16, 17, "17 stages, .* 16 links .*at most 16"),
        (even, 3, 0, "0 stages: .*at least one"),
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
