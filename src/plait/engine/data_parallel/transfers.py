"""The moves of a row as this rank's messages on one flat buffer: made once, sent in every step."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.comm import Comm, Work
from plait.comm.prepared import Alone, Prepared
from plait.core.cells import Move
from plait.core.collectives import Note
from plait.core.flat import FlatLayout, Message, lower


@dataclass(frozen=True)
class Transfer(Message):
    """A message, and which elements of the flat buffer are this rank's piece of it (where it has pieces)."""

    own: tuple[int, int] = (0, 0)


def transfers(moves: Sequence[Move], layout: FlatLayout, comm: Comm) -> tuple[Transfer, ...]:
    """The messages of some moves, in the order in which all ranks send them."""
    messages = []
    for move in moves:
        for m in lower(move, layout, comm.mesh, comm.rank):
            piece = m.numel // comm.mesh.count(m.axes)
            first = m.start + comm.mesh.index(comm.rank, m.axes) * piece
            messages.append(Transfer(m.kind, m.axes, m.start, m.stop, m.root, (first, first + piece)))
    return tuple(messages)


def prepare(
    comm: Comm, message: Transfer, array: Tensor, base: int, note: Note, out: Tensor | None = None
) -> Prepared | Alone:
    """One message on ``array``, which has the flat elements from ``base`` on, to be started as often as it is wanted.

    A reduce-scatter writes this rank's piece to ``out``, or in place where it is not given.
    """
    view, (first, end) = array[message.start - base : message.stop - base], message.own
    piece = None
    if message.kind in ("all_gather", "reduce_scatter"):
        piece = array[first - base : end - base] if out is None else out
    return comm.prepare(message.kind, view, piece, message.axes, note, None if message.root < 0 else message.root)


def send(comm: Comm, message: Transfer, array: Tensor, base: int, note: Note, out: Tensor | None = None) -> Work:
    """Start it once."""
    return prepare(comm, message, array, base, note, out).start()
