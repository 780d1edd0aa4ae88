"""A tensor that is being sent, in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm.operation import Operation

CHUNK_BYTES = 2**21
WINDOW = 2
"""The most chunks that wait to be read."""


class Outgoing:
    """The chunks of a tensor, and the progress of sending them.

    Args:
        lent: the tensor may be read in place until the operation is over.
        back: the reader's result replaces it.
    """

    __slots__ = ("back", "chunks", "count", "lent", "operation", "pumping", "readers", "sent", "tag", "unread")

    def __init__(
        self,
        operation: Operation,
        chunks: Sequence[Tensor],
        readers: Sequence[int],
        tag: int,
        *,
        lent: bool = False,
        back: bool = False,
    ) -> None:
        self.operation, self.chunks, self.readers, self.tag = operation, chunks, readers, tag
        self.count, self.sent, self.unread = len(chunks), 0, dict.fromkeys(readers, 0)
        self.lent, self.back, self.pumping = lent, back, False

    @property
    def is_over(self) -> bool:
        """True if the tensor belongs to its owner again."""
        return self.sent >= self.count and not ((self.lent or self.back) and self.waits_for())

    @property
    def may_go_on(self) -> bool:
        """True if the window allows one more chunk; a lent tensor takes no blocks."""
        return self.sent < self.count and (self.lent or max(self.unread.values()) < WINDOW)

    def waits_for(self) -> list[int]:
        """Returns the ranks that have not read everything that was sent."""
        return [reader for reader, unread in self.unread.items() if unread]


def sliced(
    operation: Operation, slices: Sequence[Tensor], tag: int, *, lent: bool, back: bool = False
) -> list[Outgoing]:
    """Sends slice k to member k, the next member first; once for all members if all slices are the same."""
    ranks, index, n = operation.group.ranks, operation.group.index, len(slices)
    order = [(index + step) % n for step in range(1, n)]
    how = {"lent": lent, "back": back}
    if all(slices[k] is slices[order[0]] for k in order) and not back:
        return [Outgoing(operation, chunks(slices[order[0]]), [ranks[k] for k in order], tag, **how)]
    return [Outgoing(operation, chunks(slices[k]), [ranks[k]], tag, **how) for k in order]


def chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Splits a 1-D tensor into chunks; none if it is empty."""
    if tensor.nbytes <= CHUNK_BYTES:
        return (tensor,) if tensor.numel() else ()
    return torch.split(tensor, CHUNK_BYTES // tensor.element_size())
