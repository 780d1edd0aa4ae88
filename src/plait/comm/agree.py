"""Small agreements between ranks, besides their tensors: rows of numbers, checksums.  ``texts.py`` has longer ones.

    rank 0   [3, 40] --+--> [[3, 40],      one small all_gather; the rows stand in group order (the first axis
    rank 1   [3, 38] --+     [3, 38]]      outermost), so sums over them have one order everywhere

Every member of the group calls the same function, as with any collective.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm.base import Comm
from plait.table.collectives import Note


def gather_ints(comm: Comm, row: Sequence[int], axes: Sequence[str], note: Note) -> list[list[int]]:
    """Gathers every member's row of (int64) numbers; all rows are equally long."""
    return _gather_rows(comm, torch.tensor(row, dtype=torch.int64, device=comm.device), axes, note)


def gather_floats(comm: Comm, row: Sequence[float], axes: Sequence[str], note: Note) -> list[list[float]]:
    """Gathers every member's row of (fp64) numbers; all rows are equally long."""
    return _gather_rows(comm, torch.tensor(row, dtype=torch.float64, device=comm.device), axes, note)


def _gather_rows(comm: Comm, row: Tensor, axes: Sequence[str], note: Note) -> list[list[Any]]:
    rows = row.new_empty(comm.mesh.count(axes), len(row))
    comm.all_gather(rows, row, axes, note).wait()
    return list(rows.tolist())


def same_everywhere(comm: Comm, row: Sequence[int], axes: Sequence[str], note: Note) -> list[bool]:
    """Column by column, True if all members brought the same number; costs no more with more members."""
    low = torch.tensor(row, dtype=torch.int64, device=comm.device)
    high = low.clone()
    comm.all_reduce(low, axes, "min", note).wait()
    comm.all_reduce(high, axes, "max", note).wait()
    return list((low == high).tolist())


def same_tensors(comm: Comm, tensors: Iterable[Tensor], axes: Sequence[str], note: Note) -> bool:
    """Compares the bits of all members by a checksum."""
    whole = (t.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8) for t in tensors)
    mine = zlib.crc32(b"".join(bytes(t.numpy().data) for t in whole))
    return len({checksum for (checksum,) in gather_ints(comm, [mine], axes, note)}) == 1
