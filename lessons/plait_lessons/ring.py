"""The ring algorithms, written with ``send`` and ``recv``, to read and to measure against.

Every member talks only to its two neighbours.  The array is cut into n chunks; in each of n - 1 rounds every
member passes one chunk on and adds its own value to the one that arrives.  Three members, chunk 0:

    round 1    member 1  --a1-->  member 2                   (a1: chunk 0 as member 1 has it)
    round 2                       member 2  --a1+a2-->  member 0
                                                        member 0 holds a1+a2+a0, complete

and at the same time chunks 1 and 2 travel one and two places further on.  That is the reduce-scatter;
n - 1 more rounds pass the complete chunks around, which is the all-gather, and the two together are the
all-reduce: 2 (n - 1)/n of the array sent per member, whatever n is, in 2 (n - 1) rounds.

    all_reduce == reduce_scatter, then all_gather

Each chunk is added in another order (it starts at another member), so bits differ from ``comm.all_reduce``.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm.base import NO_NOTE, Comm
from plait.comm.ordered_reduce import OPS
from plait.table.collectives import Note


def all_reduce(comm: Comm, tensor: Tensor, axes: Sequence[str], op: str = "sum", note: Note = NO_NOTE) -> None:
    """The sum (or min, or max) of all members' ``tensor``, in place; any length, also shorter than n."""
    chunks = list(torch.tensor_split(tensor.view(-1), comm.mesh.count(axes)))
    _reduce_rounds(comm, chunks, tuple(axes), op, note)
    _gather_rounds(comm, chunks, tuple(axes), note)


def reduce_scatter(
    comm: Comm, out: Tensor, whole: Tensor, axes: Sequence[str], op: str = "sum", note: Note = NO_NOTE
) -> None:
    """Piece k of the sum of all members' ``whole`` into member k's ``out``; ``whole`` stays as it is."""
    axes = tuple(axes)
    chunks = _pieces(comm, whole.clone(), out, axes)
    _reduce_rounds(comm, chunks, axes, op, note)
    out.view(-1).copy_(chunks[comm.mesh.index(comm.rank, axes)])


def all_gather(comm: Comm, out: Tensor, piece: Tensor, axes: Sequence[str], note: Note = NO_NOTE) -> None:
    """Every member's ``piece``, end to end, into every member's ``out``."""
    axes = tuple(axes)
    chunks = _pieces(comm, out, piece, axes)
    chunks[comm.mesh.index(comm.rank, axes)].copy_(piece.view(-1))
    _gather_rounds(comm, chunks, axes, note)


def _reduce_rounds(comm: Comm, chunks: list[Tensor], axes: tuple[str, ...], op: str, note: Note) -> None:
    """Afterwards member k's chunk k is complete; its other chunks are partial sums."""
    me, n = comm.mesh.index(comm.rank, axes), len(chunks)
    for turn in range(1, n):
        ours, theirs = chunks[(me - turn) % n], chunks[(me - turn - 1) % n]
        arrived = torch.empty_like(theirs)
        _pass_on(comm, ours, arrived, axes, note)
        OPS[op](arrived, theirs, out=theirs)


def _gather_rounds(comm: Comm, chunks: list[Tensor], axes: tuple[str, ...], note: Note) -> None:
    """Member k starts with chunk k; afterwards all have all."""
    me, n = comm.mesh.index(comm.rank, axes), len(chunks)
    for turn in range(n - 1):
        _pass_on(comm, chunks[(me - turn) % n], chunks[(me - turn - 1) % n], axes, note)


def _pass_on(comm: Comm, ours: Tensor, arriving: Tensor, axes: tuple[str, ...], note: Note) -> None:
    """To the next member on the ring, from the one before."""
    ranks, me = comm.mesh.group(comm.rank, axes), comm.mesh.index(comm.rank, axes)
    coming = comm.recv(arriving, ranks[me - 1], note)
    going = comm.send(ours, ranks[(me + 1) % len(ranks)], note)
    coming.wait()
    going.wait()


def _pieces(comm: Comm, whole: Tensor, piece: Tensor, axes: tuple[str, ...]) -> list[Tensor]:
    n = comm.mesh.count(axes)
    if whole.numel() != n * piece.numel():
        raise ValueError(
            f"the whole has {whole.numel()} elements, but {n} pieces of {piece.numel()} make "
            f"{n * piece.numel()}: pad to equal pieces"
        )
    return list(torch.tensor_split(whole.view(-1), n))
