"""An operation that is checked once and begun as often as wanted, on the same tensors.

    comm.all_gather(out, piece, axes, note)                    checked, then begun
    again = comm.prepare("all_gather", out, piece, axes, note)
    again.start() ... again.start()                            begun: a line in the ledger, a word to the observers

A step requests the same operations every time; checking sizes, dtypes and memory each time costs as much as a small
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from plait.comm.operation import DONE, Operation, Work
from plait.table.collectives import Entry

if TYPE_CHECKING:
    from plait.comm.base import Comm


@dataclass(frozen=True, slots=True)
class Prepared:
    """One operation of a group with other members."""

    comm: Comm
    entry: Entry
    """Its line in the ledger."""
    operation: Operation
    what: Sequence[Tensor | int | None]
    """The tensors, and the other rank of a message."""
    method: Callable[..., Work]
    """The world's own, which moves them."""

    def start(self) -> Work:
        """Begins the operation."""
        return self.comm.begin(self)


@dataclass(frozen=True, slots=True)
class Alone:
    """The same for a group of one, which has no member to send to."""

    start: Callable[[], Work] = lambda: DONE
    """Copies the piece if it has to be elsewhere."""
