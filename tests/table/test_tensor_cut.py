"""A parameter's cut over the tensor axis: parts, grains, uneven sizes, and the way back."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from plait.table.tensor_cut import TensorCut


def rows_of(cut: TensorCut, index: int) -> list[int]:
    return list(chain.from_iterable(range(start, stop) for start, stop in cut.ranges(index)))


def test_one_part_is_one_run_of_rows() -> None:
    cut = TensorCut((8, 4), 0, 2, (8,))
    assert [cut.ranges(i) for i in range(2)] == [((0, 4),), ((4, 8),)]
    assert [cut.local_shape(i) for i in range(2)] == [(4, 4), (4, 4)]


def test_a_row_cut_cuts_the_second_dim() -> None:
    cut = TensorCut((3, 5), 1, 3, (5,))
    assert [cut.ranges(i) for i in range(3)] == [((0, 2),), ((2, 4),), ((4, 5),)]
    assert [cut.local_shape(i) for i in range(3)] == [(3, 2), (3, 2), (3, 1)]


def test_a_bias_has_one_dim() -> None:
    assert [TensorCut((5,), 0, 2, (5,)).local_shape(i) for i in range(2)] == [(3,), (2,)]


def test_five_rows_over_four_ranks_are_two_two_one_none() -> None:
    cut = TensorCut((5, 7), 0, 4, (5,))
    assert [cut.local_shape(i) for i in range(4)] == [(2, 7), (2, 7), (1, 7), (0, 7)]
    assert cut.ranges(3) == ((5, 5),)


def test_one_rank_holds_everything() -> None:
    assert TensorCut((5, 7), 0, 1, (2, 3)).ranges(0) == ((0, 2), (2, 5))


def test_parts_of_a_fused_output_are_cut_each_by_itself() -> None:
    cut = TensorCut((16, 4), 0, 2, (8, 4, 4), 2)
    assert cut.ranges(0) == ((0, 4), (8, 10), (12, 14))
    assert cut.ranges(1) == ((4, 8), (10, 12), (14, 16))
    assert [cut.local_shape(i) for i in range(2)] == [(8, 4), (8, 4)]


def test_parts_without_a_grain_may_be_uneven() -> None:
    cut = TensorCut((8, 1), 0, 3, (5, 3))
    assert [cut.ranges(i) for i in range(3)] == [((0, 2), (5, 6)), ((2, 4), (6, 7)), ((4, 5), (7, 8))]


def test_a_grain_keeps_heads_whole() -> None:
    cut = TensorCut((12, 2), 0, 2, (12,), 3)
    assert [cut.ranges(i) for i in range(2)] == [((0, 6),), ((6, 12),)]


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "dim", "parts", "grain"),
    [
        ((5, 3), 0, (5,), 1),
        ((3, 7), 1, (7,), 1),
        ((11,), 0, (4, 7), 1),
        ((48, 2), 0, (24, 12, 12), 1),
        ((0, 2), 0, (0,), 1),
    ],
)
def test_the_ranks_together_hold_every_element_once(
    shape: tuple[int, ...], dim: int, parts: tuple[int, ...], grain: int, ways: int
) -> None:
    cut = TensorCut(shape, dim, ways, parts, grain)
    held = [row for index in range(ways) for row in rows_of(cut, index)]
    assert sorted(held) == list(range(shape[dim]))
    assert [cut.local_shape(i)[dim] for i in range(ways)] == [len(rows_of(cut, i)) for i in range(ways)]


def says(text: str) -> str:
    return re.escape(text)


def test_parts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=says("the parts 8|2 add up to 10, not to 12")):
        TensorCut((12, 4), 0, 2, (8, 2))


def test_a_part_that_is_no_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=says("a part of 12 is no multiple of 5, the size of a head")):
        TensorCut((12, 4), 0, 2, (12,), 5)


@pytest.mark.parametrize(
    ("parts", "grain", "ways", "message"),
    [
        (
            (32,),
            16,
            4,
            "2 heads of 16 cannot be shared by tensor=4 ranks, and a head cannot be parted: use tensor=2, or",
        ),
        (
            (12,),
            2,
            4,
            "6 heads of 2 cannot be shared by tensor=4 ranks, and a head cannot be parted: use tensor=2 or 3 or 6",
        ),
        (
            (8, 4, 4),
            2,
            4,
            "2 heads of 2 cannot be shared by tensor=4 ranks, and a head cannot be parted: use tensor=2, or",
        ),
        (
            (7,),
            7,
            2,
            "1 heads of 7 cannot be shared by tensor=2 ranks, and a head cannot be parted: use no tensor axis",
        ),
    ],
)
def test_heads_that_the_ranks_cannot_share_are_refused_with_the_numbers_and_the_fix(
    parts: tuple[int, ...], grain: int, ways: int, message: str
) -> None:
    with pytest.raises(ValueError, match=says(message)) as raised:
        TensorCut((sum(parts), 3), 0, ways, parts, grain)
    assert str(raised.value).endswith(f"or make the number of heads a multiple of {ways}")
