"""The binomial-tree algorithms, written with ``send`` and ``recv``, to read and to measure against.

Members are counted from the root, v = (index - root) mod n.  In round j the members that have the array
hand it to the one 2^j further on, so all have it after log2(n) rounds (rounded up):

    broadcast, n = 6          v   0    1    2    3    4    5
    round 0                       0 -> 1
    round 1                       0 ------> 2
                                       1 ------> 3
    round 2                       0 ----------------> 4
                                            1 ----------------> 5

The parent of v is v without its highest bit.  The reduce runs the picture backwards, adding on the way; an
all-reduce is a reduce and a broadcast.  Few rounds, but the root's link carries the whole array each time:
good for short messages, where the ring (``ring.py``) is good for long ones.

``scatter`` and ``gather`` go down and up a tree too, each message holding what the whole subtree needs.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm.base import NO_NOTE, Comm
from plait.comm.ordered_reduce import OPS
from plait.table.collectives import Note


def broadcast(comm: Comm, tensor: Tensor, axes: Sequence[str], src: int = 0, note: Note = NO_NOTE) -> None:
    """The ``tensor`` of the group's member ``src``, on every member."""
    ranks, v = _places(comm, axes, src)
    if v:
        comm.recv(tensor, ranks[_parent(v)], note).wait()
    for child in _children(v, len(ranks)):
        comm.send(tensor, ranks[child], note).wait()


def reduce(
    comm: Comm, tensor: Tensor, axes: Sequence[str], dst: int = 0, op: str = "sum", note: Note = NO_NOTE
) -> None:
    """The sum of all members' ``tensor``, in place on member ``dst``; the others' stay as they are."""
    ranks, v = _places(comm, axes, dst)
    total = tensor.clone() if v else tensor
    arrived = torch.empty_like(tensor)
    for child in reversed(_children(v, len(ranks))):
        comm.recv(arrived, ranks[child], note).wait()
        OPS[op](total, arrived, out=total)
    if v:
        comm.send(total, ranks[_parent(v)], note).wait()


def all_reduce(comm: Comm, tensor: Tensor, axes: Sequence[str], op: str = "sum", note: Note = NO_NOTE) -> None:
    """The sum of all members' ``tensor``, in place on every member."""
    reduce(comm, tensor, axes, 0, op, note)
    broadcast(comm, tensor, axes, 0, note)


def reduce_scatter(
    comm: Comm, out: Tensor, whole: Tensor, axes: Sequence[str], op: str = "sum", note: Note = NO_NOTE
) -> None:
    """Piece k of the sum of all members' ``whole`` into member k's ``out``: a reduce, then a scatter."""
    total = whole.clone()
    reduce(comm, total, axes, 0, op, note)
    scatter(comm, out, total, axes, note)


def all_gather(comm: Comm, out: Tensor, piece: Tensor, axes: Sequence[str], note: Note = NO_NOTE) -> None:
    """Every member's ``piece``, end to end, into every member's ``out``: a gather, then a broadcast."""
    gather(comm, out, piece, axes, note)
    broadcast(comm, out, axes, 0, note)


def scatter(comm: Comm, out: Tensor, whole: Tensor, axes: Sequence[str], note: Note = NO_NOTE) -> None:
    """Piece k of member 0's ``whole`` into member k's ``out``."""
    ranks, v = _places(comm, axes, 0)
    held = _whole(whole, len(ranks)) if v == 0 else out.new_empty(len(_subtree(v, len(ranks))), out.numel())
    if v:
        comm.recv(held, ranks[_parent(v)], note).wait()
    rows = {place: row for row, place in enumerate(_subtree(v, len(ranks)))}
    for child in _children(v, len(ranks)):
        parcel = held[[rows[place] for place in _subtree(child, len(ranks))]]
        comm.send(parcel, ranks[child], note).wait()
    out.view(-1).copy_(held[0])


def gather(comm: Comm, out: Tensor, piece: Tensor, axes: Sequence[str], note: Note = NO_NOTE) -> None:
    """Every member's ``piece``, end to end, into member 0's ``out``."""
    ranks, v = _places(comm, axes, 0)
    places = _subtree(v, len(ranks))
    held = _whole(out, len(ranks)) if v == 0 else piece.new_empty(len(places), piece.numel())
    held[0] = piece.view(-1)
    rows = {place: row for row, place in enumerate(places)}
    for child in reversed(_children(v, len(ranks))):
        below = _subtree(child, len(ranks))
        parcel = piece.new_empty(len(below), piece.numel())
        comm.recv(parcel, ranks[child], note).wait()
        held[[rows[place] for place in below]] = parcel
    if v:
        comm.send(held, ranks[_parent(v)], note).wait()


def _places(comm: Comm, axes: Sequence[str], root: int) -> tuple[tuple[int, ...], int]:
    """The group's ranks counted from the root, and this rank's place among them."""
    ranks = comm.mesh.group(comm.rank, tuple(axes))
    return ranks[root:] + ranks[:root], (ranks.index(comm.rank) - root) % len(ranks)


def _parent(v: int) -> int:
    """``v`` without its highest bit."""
    return v - (1 << (v.bit_length() - 1))


def _children(v: int, n: int) -> list[int]:
    """The members that take from ``v``, in the order of the rounds."""
    first = v.bit_length()
    return [v + (1 << j) for j in range(first, n.bit_length()) if v + (1 << j) < n]


def _subtree(v: int, n: int) -> list[int]:
    """``v`` and everyone below it, ascending."""
    return sorted([v, *(place for child in _children(v, n) for place in _subtree(child, n))])


def _whole(whole: Tensor, n: int) -> Tensor:
    if whole.numel() % n:
        raise ValueError(f"{whole.numel()} elements do not make {n} equal pieces: pad them")
    return whole.view(n, whole.numel() // n)
