"""Dropout masks as a pure function of keys and element indices, for the engine and for ShardedTensors.

    key (64 bits)   <- blake2b(anything printable)                          what the mask belongs to
    bits (32 bits)  <- mix(mix(element index xor key_low) + key_high)       one per element
    keep            <- bits >= p * 2**32

Any slice of a mask can be computed by itself, and every device makes the same one.  A CPU uses numpy, whose 32-bit
products wrap around and are four times as fast as torch's 64-bit ones.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOW32 = 0xFFFFFFFF
"""The lower half of a key."""
_CHUNK = 1 << 16
"""Elements that a CPU hashes at a time: four bytes each, they stay in the second-level cache."""


def stream_key(*parts: object) -> int:
    """Returns 64 bits from anything printable; equal parts give equal keys on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mix(x: Any) -> Any:
    """One round, in place, on values below 2**32: int64 of torch (both factors are below 2**31) or uint32 of numpy."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x6C078965)):
        x ^= x >> shift
        x *= factor
        x &= LOW32
    x ^= x >> 16
    return x


def random_bits(index: Any, low: Any, high: Any) -> Any:
    """Returns 32 bits per element from indices below 2**32 and the two halves of a key."""
    bits = _mix(index ^ low)
    bits += high
    bits &= LOW32
    return _mix(bits)


def box_mask(
    key: int, whole: Sequence[int], start: Sequence[int], extent: Sequence[int], p: float, device: torch.device
) -> Tensor:
    """The survivors of dropout in a box: bool of shape ``extent``; the box is at ``start`` of a ``whole`` shape.

    The indices are those of the whole tensor, row by row, which may have more than 2**32 elements.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, first, length in zip(whole, start, extent, strict=True):
        index = index[..., None] * size + torch.arange(first, first + length, device=device)
    bits: Tensor = random_bits(index & LOW32, key & LOW32, (index >> 32) + (key >> 32))
    return bits >= math.floor(p * 2**32)


@dataclass(frozen=True)
class Slice:
    """The part of an activation that a rank holds: it begins at ``start`` of ``whole`` elements along ``dim``."""

    dim: int
    start: int
    whole: int

    def indices(self, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Maps flat indices within a local tensor of ``shape`` to flat indices within the whole one."""
        inner = math.prod(shape[self.dim + 1 :])
        here, there = shape[self.dim] * inner, self.whole * inner

        def whole_index(index: Tensor) -> Tensor:
            return index + index.div(max(here, 1), rounding_mode="floor") * (there - here) + self.start * inner

        return whole_index


def _halves(keys: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """The lower and the upper halves of keys, one a row."""
    return [[key & LOW32] for key in keys], [[key >> 32] for key in keys]


def stream_bits(
    keys: Sequence[int], numel: int, device: torch.device, place: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """32 random bits for every element: int64 [len(keys), numel], one key a row; ``place`` as in ``keep_mask``."""
    halves = torch.tensor(_halves(keys), dtype=torch.int64).view(2, len(keys), 1)
    if device.type == "cuda":  # a copy from other memory stops this thread until the GPU has done all its work
        halves = halves.pin_memory()
    index = torch.arange(numel, dtype=torch.int64, device=device)
    bits: Tensor = random_bits(index if place is None else place(index), *halves.to(device, non_blocking=True))
    return bits


def keep_mask(
    keys: Sequence[int], numel: int, p: float, device: torch.device, place: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The elements that survive dropout of probability ``p``: bool [len(keys), numel], one key a row.

    ``numel`` may be at most 2**32.  Where the elements are a slice of an activation, ``place`` maps their indices to
    those of the whole activation.
    """
    threshold = math.floor(p * 2**32)
    if device.type != "cpu" or not threshold:
        return stream_bits(keys, numel, device, place) >= threshold
    low, high = np.array(_halves(keys), np.uint32).reshape(2, len(keys), 1)
    keep = np.empty((len(keys), numel), bool)
    for start in range(0, numel, _CHUNK):
        stop = min(start + _CHUNK, numel)
        index = np.arange(start, stop) if place is None else place(torch.arange(start, stop, device=device)).numpy()
        index, rows = index.astype(np.uint32), _CHUNK // (stop - start)
        for some in (slice(first, first + rows) for first in range(0, len(keys), rows)):
            np.greater(random_bits(index, low[some], high[some]), threshold - 1, out=keep[some, start:stop])
    return torch.from_numpy(keep)
