"""A rank's own shared memory: blocks, each for one message under way, and tensors that others may read in place.

    empty(n, dtype)   a tensor; its memory is used again once nothing refers to it any more
    place(x)          where x is, if it is in such a tensor
    put(x)            a block with a copy of x; free(block) when it was read, for the next of its size

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
    """``size`` bytes from ``offset`` on in a segment."""

    segment: Segment
    offset: int
    size: int
    source: Tensor | None = None
    """The tensor that receives the reader's result, once the block is read."""

    @property
    def place(self) -> tuple[int, int]:
        """The segment's descriptor, and the offset."""
        return self.segment.descriptor, self.offset


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

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a 1-D tensor that others may read in place; MemoryError if there is no room for it."""
        block = self.take(max(ALIGNMENT, -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT))
        memory = (ctypes.c_char * block.size).from_buffer(block.segment.buffer, block.offset)
        address = ctypes.addressof(memory)
        self._tensors[address] = block
        weakref.finalize(memory, self._end, address).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=dtype, count=numel)

    def _end(self, address: int) -> None:
        self.free(self._tensors.pop(address))

    def place(self, data: Tensor) -> tuple[int, int] | None:
        """Returns where ``data`` is, if it is in a tensor of this memory."""
        home = self._tensors.get(data.untyped_storage().data_ptr())
        if home is None:
            return None
        return home.segment.descriptor, home.offset + int(data.storage_offset()) * data.element_size()

    def put(self, data: Tensor, *, back: bool = False) -> SharedBlock:
        """Returns a block with ``data``, which is 1-D; with ``back``, the value that the reader writes in its place
        becomes its new value."""
        block = self.take(rounded(data.nbytes))
        block.segment.view(block.offset, data.numel(), data.dtype).copy_(data)
        block.source = data if back else None
        return block

    def free(self, block: SharedBlock) -> None:
        """Frees a block that was read."""
        if block.source is not None:
            block.source.copy_(block.segment.view(block.offset, block.source.numel(), block.source.dtype))
            block.source = None
        self._free.setdefault(block.size, []).append(block)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    def take(self, size: int) -> SharedBlock:
        """Returns a free block of a size."""
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
