"""Blocks of a rank's own shared memory, each for one message under way.

    put(x, readers)   copies x into a free block          the caller may write x again at once
    read(block)       one reader has had it; the last one frees it, for the next of its size

Blocks are used again, the latest first, because fresh memory costs more than the copy.  Sizes are rounded up to four
steps per power of two, so that a block fits what comes next; there are no other rules, and memory is never given back.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plait.comm.shared_memory.segment import Segment

ALIGNMENT = 64
FIRST_BYTES, LARGEST_BYTES = 2**20, 2**26
"""Sizes of segments: as much again as there is, from the first to the last of these, or what a message needs."""


@dataclass(slots=True)
class SharedBlock:
    """``size`` bytes from ``offset`` on in a segment, and how many have not read it yet."""

    segment: Segment
    offset: int
    size: int
    readers: int = 0
    outgoing: object = None
    """What it is a part of."""


class Arena:
    """The blocks of one rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._segments: list[Segment] = []
        self._free: dict[int, list[SharedBlock]] = {}
        self._used = 0
        """Bytes of the last segment that were ever in a block."""
        self._under_way: dict[tuple[int, int], SharedBlock] = {}
        """Blocks that somebody has not read, by the descriptor of the segment and the offset."""

    def put(self, data: Tensor, readers: int) -> SharedBlock:
        """A block with a copy of ``data``, of 1 dim; a MemoryError where there is no room for it."""
        size = rounded(data.nbytes)
        free = self._free.get(size)
        block = free.pop() if free else self._new(size)
        block.readers = readers
        block.segment.view(block.offset, data.numel(), data.dtype).copy_(data)
        self._under_way[block.segment.descriptor, block.offset] = block
        return block

    def read(self, descriptor: int, offset: int) -> SharedBlock | None:
        """A reader says that it has read a block; the block, where that was the last one."""
        block = self._under_way[descriptor, offset]
        block.readers -= 1
        if block.readers:
            return None
        del self._under_way[descriptor, offset]
        self._free.setdefault(block.size, []).append(block)
        return block

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    def _new(self, size: int) -> SharedBlock:
        if not self._segments or self._used + size > self._segments[-1].size:
            total = sum(segment.size for segment in self._segments)
            self._segments.append(Segment.make(max(size, min(max(total, FIRST_BYTES), LARGEST_BYTES)), self._name))
            self._used = 0
        block = SharedBlock(self._segments[-1], self._used, size)
        self._used += size
        return block


def rounded(nbytes: int) -> int:
    """The size of the block for so many bytes: multiples of 64 up to 512, then 640, 768, 896, 1024, 1280, ...."""
    step = max(ALIGNMENT, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(ALIGNMENT, -(-nbytes // step) * step)
