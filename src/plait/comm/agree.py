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


class Rows:
    """Rows of one length, gathered any number of times: the message is checked once, on buffers that stay.

    Args:
        dtype: int64 or fp64.
    """

    def __init__(self, comm: Comm, length: int, dtype: torch.dtype, axes: Sequence[str], note: Note) -> None:
        # The numbers are on the hosts: no device is involved.
        self._rows = torch.empty(comm.mesh.count(axes), length, dtype=dtype)
        self._mine = torch.empty(length, dtype=dtype)
        self._message = comm.prepare("all_gather", self._rows, self._mine, axes, note)

    def gather(self, row: Sequence[float]) -> list[list[Any]]:
        """Gathers every member's row."""
        self._mine.copy_(torch.tensor(row, dtype=self._mine.dtype))
        self._message.start().wait()
        return list(self._rows.tolist())


def gather_ints(comm: Comm, row: Sequence[int], axes: Sequence[str], note: Note) -> list[list[int]]:
    """Gathers every member's row of (int64) numbers; all rows must be equally long."""
    return Rows(comm, len(row), torch.int64, axes, note).gather(row)


def gather_floats(comm: Comm, row: Sequence[float], axes: Sequence[str], note: Note) -> list[list[float]]:
    """Gathers every member's row of (fp64) numbers; all rows must be equally long."""
    return Rows(comm, len(row), torch.float64, axes, note).gather(row)
