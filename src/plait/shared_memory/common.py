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

from plait.comm.operation import Group, Operation
from plait.comm.transport import Transport
from plait.shared_memory import semaphore
from plait.shared_memory.arena import ALIGNMENT
from plait.shared_memory.mailbox_registry import MailboxRegistry
from plait.shared_memory.segment import Segment
from plait.shared_memory.semaphore import Semaphore

FIRST_BYTES, LARGEST_BYTES = 2**18, 2**26
SPARE = 16
"""The least size of a segment, as a share of the total: 1/16."""

COMMON = 2
"""The tag of the messages that create common memory."""

Share = Callable[[int, Callable[[Segment], None]], Segment]
"""Makes a segment of this size for all members of a group; calls the second argument on it before others see it."""


class CommonMemory:
    """The common memory of one group, seen from one of its ranks.

    Args:
        group: the ranks that create it together.
    """

    def __init__(self, group: Group, share: Share) -> None:
        self.group, self._share = group, share
        self._segment: Segment | None = None
        """The last segment, from which memory is taken."""
        self._used, self._total = 0, 0
        self._alive: WeakValueDictionary[int, mmap] = WeakValueDictionary()
        """The buffers of segments, by their addresses."""
        n, me, others = len(group.ranks), group.index, [(k, r) for k, r in enumerate(group.ranks) if k != group.index]
        self._bells = share(n * n * semaphore.SIZE, _begin)
        bells = _bells(self._bells)  # the bell of k for j: at k * n + j
        self._mine = {r: bells[me * n + k] for k, r in others}
        self._theirs = {r: bells[k * n + me] for k, r in others}
        self._told, self._heard = 0, {r: 0 for _, r in others}
        self._settled = 0
        """The last generation that all members have written."""
        self.generation = 0
        """The generation that this rank has written, or is about to."""

    def tell(self) -> Iterable[int]:
        """Reports that this rank's pieces of all generations are written; returns the ranks that it reports to."""
        missed, self._told = self.generation - self._told, self.generation
        for bell in self._mine.values() if missed else ():
            for _ in range(missed):
                bell.post()
        return self._mine if missed else ()

    def silent(self, generation: int) -> list[int]:
        """Returns the ranks that have not reported yet that their pieces of a generation are written."""
        if generation <= self._settled:
            return []
        for rank, bell in self._theirs.items():
            while self._heard[rank] < generation and bell.take():
                self._heard[rank] += 1
        missing = [rank for rank, heard in self._heard.items() if heard < generation]
        self._settled = self._settled if missing else generation
        return missing

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the group's next memory, ``numel`` zeros; all members ask for the same, and write to it."""
        self.generation += 1
        size = -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if self._segment is None or self._used + size > self._segment.size:
            spare = min(max(self._total // SPARE, FIRST_BYTES), LARGEST_BYTES)
            self._segment, self._used = self._share(max(size, spare), lambda segment: None), 0
            self._total += self._segment.size
            self._alive[self._segment.address] = self._segment.buffer
        start, self._used = self._used, self._used + size
        return self._segment.view(start, numel, dtype)

    def has(self, tensor: Tensor, ranks: Sequence[int]) -> bool:
        """True if a tensor is in this memory, and the group has all these ranks."""
        return tensor.untyped_storage().data_ptr() in self._alive and set(self.group.ranks).issuperset(ranks)


def _bells(segment: Segment) -> list[Semaphore]:
    """Returns the semaphores that make up a segment."""
    return [Semaphore(segment.address + start) for start in range(0, segment.size, semaphore.SIZE)]


def _begin(segment: Segment) -> None:
    for bell in _bells(segment):
        bell.begin()


def share_segment(
    transport: Transport, registry: MailboxRegistry, operation: Operation, size: int, prepare: Callable[[Segment], None]
) -> Segment:
    """Returns a segment that the first member of a group makes, and all of them open."""
    (first, *others), opened = operation.group.ranks, torch.zeros(1, dtype=torch.uint8)
    if transport.rank == first:
        try:
            segment = Segment.make(size, registry.name)
        except MemoryError as error:  # the others wait for it, and read the reason
            transport.give_up(f"rank {transport.rank}: {error}")
            raise
        prepare(segment)
        for dst in others:
            transport.send(operation, torch.tensor([segment.descriptor]), dst, COMMON)
        transport.wait(operation, [w for src in others for w in transport.recv(operation, opened, src, COMMON)])
        segment.close()
        return segment
    descriptor = torch.zeros(1, dtype=torch.int64)
    transport.wait(operation, transport.recv(operation, descriptor, first, COMMON))
    try:
        segment = registry.open(first, int(descriptor))
    except OSError as error:
        raise transport.failure(operation, error) from error
    transport.send(operation, opened, first, COMMON)
    return segment
