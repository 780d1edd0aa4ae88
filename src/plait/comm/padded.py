"""Pieces of unequal length in collectives that need equal ones: they are padded with zeros to the longest.

    5 rows over 4 ranks      0 1 | 2 3 | 4 . | . .      lengths 2, 2, 1, 0 travel as 2, 2, 2, 2

``lengths`` are the lengths of all ranks' pieces along ``dim``, in group order; the first is the longest.  Inputs stay
as they are.  A function here sends its message when it is called; the ``Finish`` that it returns waits for it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.comm import Comm
from plait.table.collectives import Note

Finish = Callable[[], Tensor]
"""Waits for messages under way and returns their result."""


def padded(piece: Tensor, dim: int, length: int) -> Tensor:
    """Pads a piece with zeros along ``dim`` to this length; returns the piece itself if it is already that long."""
    missing = length - piece.size(dim)
    if not missing:
        return piece
    return torch.cat((piece, piece.new_zeros((*piece.shape[:dim], missing, *piece.shape[dim + 1 :]))), dim)


def start_gather(
    comm: Comm, piece: Tensor, dim: int, lengths: Sequence[int], axes: tuple[str, ...], note: Note
) -> Finish:
    """Starts to gather the whole from every rank's piece."""
    piece = padded(piece, dim, lengths[0]).contiguous()
    pieces = piece.new_empty((len(lengths), *piece.shape))
    work = comm.all_gather(pieces, piece, axes, note=note)

    def finish() -> Tensor:
        work.wait()
        if len(set(lengths)) == 1:
            whole: Tensor = pieces.movedim(0, dim).flatten(dim, dim + 1)
            return whole
        return torch.cat([p.narrow(dim, 0, n) for p, n in zip(pieces, lengths, strict=True)], dim)

    return finish


def start_scatter(
    comm: Comm, share: Tensor, dim: int, lengths: Sequence[int], axes: tuple[str, ...], note: Note
) -> Finish:
    """Starts to sum the ranks' shares, each as long as the whole, and to keep this rank's piece of the sum."""
    if len(set(lengths)) > 1:
        share = torch.cat([padded(piece, dim, lengths[0]) for piece in share.split(list(lengths), dim)], dim)
    pieces = share.unflatten(dim, (len(lengths), lengths[0])).movedim(dim, 0).contiguous()
    out = torch.empty_like(pieces[0])
    work = comm.reduce_scatter(out, pieces, axes, note=note)

    def finish() -> Tensor:
        work.wait()
        return out.narrow(dim, 0, lengths[comm.mesh.index(comm.rank, axes)])

    return finish


def exchange(
    comm: Comm, piece: Tensor, source: tuple[int, Sequence[int]], target: tuple[int, Sequence[int]],
    axes: tuple[str, ...], note: Note,
) -> Tensor:  # fmt: skip
    """Turns a piece of dim ``source`` into one of dim ``target`` (each a dim and its lengths), by an all_to_all."""
    (dim, lengths), (other, ends) = source, target
    messages = torch.stack([padded(padded(p, other, ends[0]), dim, lengths[0]) for p in piece.split(list(ends), other)])
    out = torch.empty_like(messages)
    comm.all_to_all(out, messages, axes, note).wait()
    mine = ends[comm.mesh.index(comm.rank, axes)]
    return torch.cat([p.narrow(dim, 0, n).narrow(other, 0, mine) for p, n in zip(out, lengths, strict=True)], dim)
