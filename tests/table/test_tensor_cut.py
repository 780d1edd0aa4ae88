"""A parameter's cut over the tensor axis: parts, grains, uneven sizes, and the way back."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from plait.table.tensor_cut import TensorCut


def rows_of(cut: TensorCut, index: int) -> list[int]:
    return list(chain.from_iterable(range(start, stop) for start, stop in cut.ranges(index)))


CUTS = {
    "one part is one run of rows": (TensorCut((8, 4), 0, 2, (8,)), ["0:4", "4:8"]),
    "a row cut cuts the second dim": (TensorCut((3, 5), 1, 3, (5,)), ["0:2", "2:4", "4:5"]),
    "a bias has one dim": (TensorCut((5,), 0, 2, (5,)), ["0:3", "3:5"]),
    "five rows over four ranks": (TensorCut((5, 7), 0, 4, (5,)), ["0:2", "2:4", "4:5", "5:5"]),
    "one rank holds everything": (TensorCut((5, 7), 0, 1, (2, 3)), ["0:2 2:5"]),
    "each part by itself": (TensorCut((16, 4), 0, 2, (8, 4, 4), 2), ["0:4 8:10 12:14", "4:8 10:12 14:16"]),
    "parts without a grain": (TensorCut((8, 1), 0, 3, (5, 3)), ["0:2 5:6", "2:4 6:7", "4:5 7:8"]),
    "nothing to cut": (TensorCut((0, 2), 0, 2, (0,)), ["0:0", "0:0"]),
    "a grain keeps heads whole": (TensorCut((12, 2), 0, 2, (12,), 3), ["0:6", "6:12"]),
}


@pytest.mark.parametrize("name", CUTS)
def test_as_drawn(name: str) -> None:
    cut, drawn = CUTS[name]
    assert [" ".join(f"{a}:{b}" for a, b in cut.ranges(i)) for i in range(len(drawn))] == drawn
    for i in range(len(drawn)):
        shape = list(cut.shape)
        shape[cut.dim] = len(rows_of(cut, i))
        assert cut.local_shape(i) == tuple(shape)


SHARED = (
    "cannot be shared by tensor={} ranks, and a head cannot be parted: use {}, or make the number of heads a multiple"
)


@pytest.mark.parametrize(
    ("parts", "grain", "ways", "rows", "message"),
    [
        ((8, 2), 1, 2, 12, "the parts 8|2 add up to 10, not to 12"),
        ((12,), 5, 2, 12, "a part of 12 is no multiple of 5, the size of a head"),
        ((32,), 16, 4, 32, f"2 heads of 16 {SHARED.format(4, 'tensor=2')} of 4"),
        ((12,), 2, 4, 12, f"6 heads of 2 {SHARED.format(4, 'tensor=2 or 3 or 6')} of 4"),
        ((8, 4, 4), 2, 4, 16, f"2 heads of 2 {SHARED.format(4, 'tensor=2')} of 4"),
        ((7,), 7, 2, 7, f"1 heads of 7 {SHARED.format(2, 'no tensor axis')} of 2"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers_and_the_fix(
    parts: tuple[int, ...], grain: int, ways: int, rows: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorCut((rows, 3), 0, ways, parts, grain)
