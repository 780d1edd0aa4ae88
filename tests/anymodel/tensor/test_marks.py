"""What is cut, through changes of shape: whole heads stay cut, and of what cannot be told nothing is said."""

from __future__ import annotations

import pytest

from plait.anymodel.tensor.marks import Cut, Dim, Dims, Factor, between, cut_of, joined, plain, regrouped, runs


def h(size: int, *parts: int, grain: int = 1) -> Dims:
    """[2, 5, size], its last dim cut over two ranks."""
    return (*plain((2, 5)), (Factor(size, Cut("up", 2 * size, parts or (size,), grain)),))


def cuts(dims: Dims | None) -> list[tuple[int, ...] | None]:
    """Dim by dim, the parts of what is cut."""
    assert dims is not None
    return [None if (cut := cut_of(dim)) is None else cut.parts for dim in dims]


def test_a_view_by_heads_leaves_the_heads_cut() -> None:
    dims = regrouped(h(24, grain=4), (2, 5, 6, 4))
    assert cuts(dims) == [None, None, (6,), None]
    assert dims is not None
    cut = cut_of(dims[2])
    assert cut is not None
    assert (cut.whole, cut.grain, cut.unit) == (12, 1, "groups of 4 features")


def test_what_was_taken_apart_is_put_together_again() -> None:
    dims = regrouped(h(24, grain=4), (2, 5, 6, 4))
    assert dims is not None
    flat = regrouped(dims, (10, 24))
    assert flat is not None
    assert runs(flat[1]) == (24,) and cut_of(flat[0]) is None
    assert cuts(regrouped(flat, (2, 5, 6, 4))) == [None, None, (6,), None]


def test_heads_in_front_of_time_do_not_lie_end_to_end() -> None:
    """[heads of 4, 6 heads]: in the whole each 4 of 12 heads lie together."""
    dims = regrouped(h(24, grain=4), (2, 5, 6, 4))
    assert dims is not None
    flat = regrouped((dims[0], dims[1], dims[3], dims[2]), (2, 5, 24))
    assert flat is not None
    assert runs(flat[2]) is None and cut_of(flat[2]) is not None


def test_a_fused_product_is_cut_in_each_part() -> None:
    assert cuts(regrouped(h(24, 16, 4, 4, grain=4), (2, 5, 6, 4))) == [None, None, (4, 1, 1), None]
    assert cuts(regrouped(h(24, 12, 12), (2, 5, 2, 12))) == [None, None, None, (12,)]


def test_a_rank_with_one_head_has_it_cut() -> None:
    assert cuts(regrouped(h(4, grain=4), (2, 5, 1, 4))) == [None, None, (1,), None]
    assert cuts(regrouped(h(4), (2, 5, 1, 4), open_at=2)) == [None, None, (1,), None]


def test_a_stream_of_length_1_or_of_one_sample_stays_in_its_place() -> None:
    one = (*plain((1, 1)), h(8, grain=4)[2])
    assert cuts(regrouped(one, (1, 1, 2, 4), open_at=1)) == [None, None, (2,), None]
    alone = (*plain((2, 1)), h(4, grain=4)[2])
    assert cuts(regrouped(alone, (2, 1, 1, 4), open_at=2)) == [None, None, (1,), None]


@pytest.mark.parametrize(("size", "shape"), [(8, (2, 5, 1, 8)), (24, (2, 4, 5, 6)), (0, (2, 5, 0, 3))])
def test_what_cannot_be_told_is_not(size: int, shape: tuple[int, ...]) -> None:
    """Whether the 1 is a head, what is in a 4 of 5 steps, what is in nothing."""
    assert regrouped(h(size), shape) is None


def test_between_the_borders_of_parts_is_a_part() -> None:
    dim: Dim = h(24, 16, 4, 4)[2]
    found = [between(dim, *ends) for ends in ((0, 16), (16, 24), (0, 24))]
    assert [part and runs(part) for part in found] == [(16,), (4, 4), (16, 4, 4)]
    assert between(dim, 0, 8) is None and between(dim, 12, 20) is None
    assert between((Factor(7),), 2, 4) == (Factor(2),)


def test_end_to_end_are_parts_or_nothing_is_known() -> None:
    gate, up = h(6)[2], h(6)[2]
    both = joined([gate, up])
    assert both is not None and runs(both) == (6, 6)
    assert joined([gate, (Factor(6),)]) is None
    assert joined([(Factor(2),), (Factor(3),)]) == (Factor(5),)
