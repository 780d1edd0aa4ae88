"""Common memory of the ranks of a group: one copy that all of them map.

    rank 0   [ own piece | ......... | ......... ]         each writes its own piece, and reports "mine is written" to
    rank 1   [ ......... | own piece | ......... ]         each; all_gather moves nothing: it waits for all reports,
    rank 2   [ ......... | ......... | own piece ]         and does nothing if there is nothing new

An update or a load writes a generation, and all members count the same ones.  A member reports to the others each time
that it has written its pieces, and a reader of generation n waits until all others have reported n times.

The first rank of the group creates a segment, the others open it, and the memory of tensors is cut from it in turn: all
members ask for the same tensors, so all cut the same places.  Segments live as long as their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from plait.comm.operation import Group
from plait.shared_memory.arena import ALIGNMENT
from plait.shared_memory.bells import Bells
from plait.shared_memory.segment import Segment

FIRST_BYTES, LARGEST_BYTES = 2**18, 2**26
SPARE = 16
"""The least size of a segment, as a share of the total: 1/16."""


class CommonMemory:
    """The common memory of one group, seen from one of its ranks.

    Args:
        group: the ranks that create it together.
        written: their reports.
        share: makes a segment of this size for all of them.
    """

    def __init__(self, group: Group, written: Bells, share: Callable[[int], Segment]) -> None:
        self.group, self._written, self._share = group, written, share
        self._segment: Segment | None = None
        """The last segment, from which memory is taken."""
        self._used, self._total = 0, 0
        self._alive: WeakValueDictionary[int, mmap] = WeakValueDictionary()
        """The buffers of segments, by their addresses."""
        self.generation = self.complete = 0
        """The generation that this rank has written or is about to, and the last that all are known to have written."""

    def tell(self) -> Iterable[int]:
        """Reports that this rank's pieces of all generations are written; returns the ranks that it reports to."""
        return self._written.tell(self.generation)

    def silent(self, generation: int) -> list[int]:
        """Returns the ranks that have not reported yet that their pieces of a generation are written."""
        return self._written.silent(generation)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the group's next memory, ``numel`` zeros; all members ask for the same, and write to it."""
        self.generation += 1
        size = -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if self._segment is None or self._used + size > self._segment.size:
            spare = min(max(self._total // SPARE, FIRST_BYTES), LARGEST_BYTES)
            self._segment, self._used = self._share(max(size, spare)), 0
            self._total += self._segment.size
            self._alive[self._segment.address] = self._segment.buffer
        start, self._used = self._used, self._used + size
        return self._segment.view(start, numel, dtype)

    def has(self, tensor: Tensor, ranks: Sequence[int]) -> bool:
        """True if a tensor is in this memory, and the group has all these ranks."""
        return tensor.untyped_storage().data_ptr() in self._alive and set(self.group.ranks).issuperset(ranks)
