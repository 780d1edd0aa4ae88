"""The moves of a row as this rank's messages on one flat buffer, the same in every step."""

from collections.abc import Sequence

from torch import Tensor

from plait.comm import Comm
from plait.comm.operation import Alone, Prepared
from plait.table.cells import Move
from plait.table.collectives import Note
from plait.table.flat import FlatLayout, Message, lower


def move_by_move(moves: Sequence[Move], layout: FlatLayout, comm: Comm) -> list[tuple[Message, ...]]:
    """The messages of each move that sends; each starts from the result of the move before.  Uneven pieces may be empty
    on this rank only, but a move exists on all ranks or on none."""
    return [lower(move, layout, comm.mesh, comm.rank) for move in moves if move.sends(comm.mesh)]


def prepare(
    comm: Comm, message: Message, array: Tensor, base: int, note: Note, out: Tensor | None = None
) -> Prepared | Alone:
    """Prepares one message on ``array``, which has the flat elements from ``base`` on; it may be started many times.

    A reduce-scatter writes this rank's piece to ``out``, or in place if there is no ``out``.
    """
    view, piece = array[message.start - base : message.stop - base], out
    if message.kind not in ("all_gather", "reduce_scatter"):
        piece = None
    elif out is None:
        piece = view.chunk(comm.mesh.count(message.axes))[comm.mesh.index(comm.rank, message.axes)]
    return comm.prepare(message.kind, view, piece, message.axes, note, None if message.root < 0 else message.root)
