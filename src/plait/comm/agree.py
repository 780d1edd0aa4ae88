"""Rows of numbers that all ranks of a group gather, besides their tensors.  ``texts.py`` compares longer values.

    rank 0   [3, 40] --+--> [[3, 40],      one small all_gather; the rows are in group order (the first axis
    rank 1   [3, 38] --+     [3, 38]]      outermost), so sums over them have one order everywhere

Every member of the group calls the same function, as with any collective.
"""

from collections.abc import Sequence
from typing import Any

import torch

from plait.comm.base import Comm
from plait.table.collectives import Note


def gather_ints(comm: Comm, row: Sequence[int], axes: Sequence[str], note: Note) -> list[list[int]]:
    """Gathers every member's row of (int64) numbers; all rows must be equally long."""
    return _gather_rows(comm, list(map(int, row)), torch.int64, axes, note)


def gather_floats(comm: Comm, row: Sequence[float], axes: Sequence[str], note: Note) -> list[list[float]]:
    """Gathers every member's row of (fp64) numbers; all rows must be equally long."""
    return _gather_rows(comm, list(map(float, row)), torch.float64, axes, note)


def _gather_rows(comm: Comm, row: list[Any], dtype: torch.dtype, axes: Sequence[str], note: Note) -> list[list[Any]]:
    if comm.mesh.count(axes) == 1:
        return [row]
    piece = torch.tensor(row, dtype=dtype)  # the numbers are on the hosts: no device is involved
    rows = piece.new_empty(comm.mesh.count(axes), len(row))
    comm.all_gather(rows, piece, axes, note).wait()
    return list(rows.tolist())
