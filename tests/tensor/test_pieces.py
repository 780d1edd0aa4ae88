"""A rank's piece of a parameter, and the whole from all pieces."""

from __future__ import annotations

import pytest
import torch
from parallel_cases import values

from plait.table.tensor_cut import TensorCut
from plait.tensor.pieces import assemble, piece_of


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "dim", "parts", "grain"),
    [
        ((5, 3), 0, (5,), 1),
        ((3, 7), 1, (7,), 1),
        ((11,), 0, (11,), 1),
        ((11,), 0, (4, 7), 1),
        ((9, 2), 0, (2, 3, 4), 1),
        ((96, 2), 0, (48, 24, 24), 2),
        ((2, 3, 5), 2, (5,), 1),
        ((3, 2), 0, (3,), 1),
    ],
)
def test_the_whole_comes_back_from_its_pieces(
    shape: tuple[int, ...], dim: int, parts: tuple[int, ...], grain: int, ways: int
) -> None:
    whole, cut = values(*shape), TensorCut(shape, dim, ways, parts, grain)
    pieces = [piece_of(whole, cut, index) for index in range(ways)]
    assert [tuple(piece.shape) for piece in pieces] == [cut.local_shape(index) for index in range(ways)]
    assert torch.equal(assemble(pieces, cut), whole)


def test_a_piece_of_a_fused_weight_has_its_rows_of_every_part() -> None:
    whole, cut = torch.arange(16)[:, None], TensorCut((16, 1), 0, 2, (8, 4, 4), 2)
    assert piece_of(whole, cut, 0).flatten().tolist() == [0, 1, 2, 3, 8, 9, 12, 13]
    assert piece_of(whole, cut, 1).flatten().tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


def test_a_piece_of_one_part_shares_the_memory_of_the_whole() -> None:
    whole = values(5, 3)
    piece_of(whole, TensorCut((5, 3), 0, 2, (5,)), 1).zero_()
    assert whole[3:].count_nonzero() == 0 and whole[:3].count_nonzero() == 9
