"""Even cuts: every link once, in order, the larger stages first."""

from __future__ import annotations

import pytest

from plait.core.split import even


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
