"""An operation that is checked once and begun as often as wanted, on the same tensors.

    comm.all_gather(out, piece, axes, note)                    checked, then begun
    again = comm.prepare("all_gather", out, piece, axes, note)
    again.start() ... again.start()                            begun: a line in the ledger, a word to the observers

A step requests the same operations every time; checking sizes, dtypes and memory each time costs as much as a small
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from plait.comm.operation import DONE, Operation, Work
from plait.table.collectives import Entry

if TYPE_CHECKING:
    from plait.comm.base import Comm


class Prepared:
    """One operation of a group with other members.

    Args:
        entry: its line in the ledger.
        what: the tensors, and the other rank of a message.
        method: the world's own, which moves them.
    """

    __slots__ = ("_comm", "entry", "method", "operation", "what")

    def __init__(
        self,
        comm: Comm,
        entry: Entry,
        operation: Operation,
        what: Sequence[Tensor | int | None],
        method: Callable[..., Work],
    ) -> None:
        self._comm, self.entry, self.operation, self.what, self.method = comm, entry, operation, what, method

    def start(self) -> Work:
        """Begins the operation."""
        return self._comm.begin(self)


class Alone:
    """The same for a group of one, which has no member to send to."""

    __slots__ = ("_copy",)

    def __init__(self, copy: Callable[[], Work] = lambda: DONE) -> None:
        self._copy = copy

    def start(self) -> Work:
        """Copies the piece if it has to be elsewhere."""
        return self._copy()
