"""A rank's own shared memory: blocks, each for one message under way, and tensors that others may read in place.

    empty(n, dtype)   a tensor; its memory is used again once nothing refers to it any more
    put(x, readers)   x itself, if it is such a tensor and may be lent; otherwise copied into a free block
    read(number)      one reader has read it; the last one frees the block, for the next of its size

Blocks are used again, the latest first, because fresh memory costs more than the copy.  Sizes are rounded up to four
steps per power of two, so that a block fits later messages; there are no other rules, and memory is never given back.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.shared_memory.segment import Segment

ALIGNMENT = 64
FIRST_BYTES, LARGEST_BYTES = 2**20, 2**26
"""The sizes of segments: each doubles the memory, between these limits, or is as large as a message needs."""


@dataclass(slots=True)
class SharedBlock:
    """``size`` bytes from ``offset`` on in a segment, and the number of readers that still need them."""

    segment: Segment
    offset: int
    size: int
    lent: bool = False
    """True if the block is part of a tensor, and must not be used again."""
    number: int = 0
    """The number by which readers name the block."""
    readers: int = 0
    outgoing: object = None
    """The message that the block is part of."""
    source: Tensor | None = None
    """The tensor that receives the reader's result, once the block is read."""


class Arena:
    """The shared memory of one rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._segments: list[Segment] = []
        self._free: dict[int, list[SharedBlock]] = {}
        self._used = 0
        """The bytes of the last segment that were ever in a block."""
        self._tensors: dict[int, SharedBlock] = {}
        """The blocks of tensors from ``empty``, by their addresses."""
        self._under_way: dict[int, SharedBlock] = {}
        """Blocks that a reader still needs, by number."""
        self._number = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a 1-D tensor that others may read in place; MemoryError if there is no room for it."""
        block = self._take(max(ALIGNMENT, -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT))
        memory = (ctypes.c_char * block.size).from_buffer(block.segment.buffer, block.offset)
        address = ctypes.addressof(memory)
        self._tensors[address] = block
        weakref.finalize(memory, self._end, address).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=dtype, count=numel)

    def _end(self, address: int) -> None:
        block = self._tensors.pop(address)
        self._free.setdefault(block.size, []).append(block)

    def put(self, data: Tensor, readers: int, *, lend: bool = False, back: bool = False) -> SharedBlock:
        """Returns a block with ``data``, which is 1-D.

        Args:
            lend: True if ``data`` stays unchanged until all have read it.
            back: True if the value that the reader writes in its place becomes its new value.
        """
        home = self._tensors.get(data.untyped_storage().data_ptr()) if lend else None
        if home is None:
            block = self._take(rounded(data.nbytes))
            block.segment.view(block.offset, data.numel(), data.dtype).copy_(data)
        else:
            inside = int(data.storage_offset()) * data.element_size()
            block = SharedBlock(home.segment, home.offset + inside, data.nbytes, lent=True)
        block.source = data if back and not block.lent else None
        self._number = block.number = (self._number + 1) % 2**32
        block.readers = readers
        self._under_way[block.number] = block
        return block

    def read(self, number: int) -> SharedBlock:
        """Marks a block as read by one reader; it is free once no reader is left."""
        block = self._under_way[number]
        block.readers -= 1
        if block.readers:
            return block
        del self._under_way[number]
        if block.source is not None:
            block.source.copy_(block.segment.view(block.offset, block.source.numel(), block.source.dtype))
            block.source = None
        if not block.lent:
            self._free.setdefault(block.size, []).append(block)
        return block

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    def _take(self, size: int) -> SharedBlock:
        if free := self._free.get(size):
            return free.pop()
        if not self._segments or self._used + size > self._segments[-1].size:
            total = sum(segment.size for segment in self._segments)
            self._segments.append(Segment.make(max(size, min(max(total, FIRST_BYTES), LARGEST_BYTES)), self._name))
            self._used = 0
        block = SharedBlock(self._segments[-1], self._used, size)
        self._used += size
        return block


def rounded(nbytes: int) -> int:
    """The size of the block for this many bytes: multiples of 64 up to 512, then 640, 768, 896, 1024, 1280, ...."""
    step = max(ALIGNMENT, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(ALIGNMENT, -(-nbytes // step) * step)
