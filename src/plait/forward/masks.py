"""Dropout masks as a pure function of keys and element indices, for the engine and for ShardedTensors.

    key (64 bits)   <- blake2b(anything printable)                          what the mask belongs to
    bits (32 bits)  <- mix(mix(element index xor key_low) + key_high)       one per element
    keep            <- bits >= p * 2**32

Any slice of a mask can be made by itself, and every device makes the same one.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOW32 = 0xFFFFFFFF
"""The lower half of a key."""
_CHUNK = 1 << 15
"""Elements hashed at a time: eight bytes each, they stay in the second-level cache."""


def stream_key(*parts: object) -> int:
    """64 bits from anything printable; equal parts give equal keys on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mix(x: Tensor) -> Tensor:
    """One round on int64 values below 2**32, in place: both multipliers are below 2**31."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x6C078965)):
        x ^= x >> shift
        x *= factor
        x &= LOW32
    x ^= x >> 16
    return x


def random_bits(index: Tensor, low: int | Tensor, high: int | Tensor) -> Tensor:
    """32 bits per element from int64 indices below 2**32 and the two halves of a key."""
    bits = _mix(index ^ low)
    bits += high
    bits &= LOW32
    return _mix(bits)


def box_mask(
    key: int, whole: Sequence[int], start: Sequence[int], extent: Sequence[int], p: float, device: torch.device
) -> Tensor:
    """Which elements of a box survive dropout: bool, the shape ``extent``, the box at ``start`` of a ``whole`` shape.

    The indices are those of the whole tensor, row by row, which may have more than 2**32 elements.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, first, length in zip(whole, start, extent, strict=True):
        index = index[..., None] * size + torch.arange(first, first + length, device=device)
    return random_bits(index & LOW32, key & LOW32, (index >> 32) + (key >> 32)) >= math.floor(p * 2**32)


@dataclass(frozen=True)
class Slice:
    """The part of an activation that a rank holds: ``start`` and on of ``whole`` elements along ``dim``."""

    dim: int
    start: int
    whole: int

    def indices(self, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """From flat indices within a local tensor of ``shape`` to flat indices within the whole one."""
        inner = math.prod(shape[self.dim + 1 :])
        here, there = shape[self.dim] * inner, self.whole * inner

        def whole_index(index: Tensor) -> Tensor:
            return index + index.div(max(here, 1), rounding_mode="floor") * (there - here) + self.start * inner

        return whole_index


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of this process, where they are computed with.  They come to a GPU from pinned memory, for which nobody
    waits: from other memory a copy stops this thread until the GPU has done all that it was asked for."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _halves(keys: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The lower and the upper halves of keys, each int64 [len(keys), 1]."""
    halves = torch.tensor([[key & LOW32 for key in keys], [key >> 32 for key in keys]], dtype=torch.int64)
    low, high = on_device(halves, device)[..., None]
    return low, high


def stream_bits(
    keys: Sequence[int], numel: int, device: torch.device, place: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """32 random bits for every element: int64 [len(keys), numel], one key a row; ``place`` is that of ``keep_mask``."""
    low, high = _halves(keys, device)
    index = torch.arange(numel, dtype=torch.int64, device=device)
    return random_bits(index if place is None else place(index), low, high)


def keep_mask(
    keys: Sequence[int], numel: int, p: float, device: torch.device, place: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Which elements survive dropout with probability ``p``: bool [len(keys), numel], one key a row.

    ``numel`` may be at most 2**32.  ``place`` maps the indices of these elements to those of the whole activation,
    where this is a slice of it.
    """
    threshold = math.floor(p * 2**32)
    low, high = _halves(keys, device)
    keep = torch.empty(len(keys), numel, dtype=torch.bool, device=device)
    width = _CHUNK if device.type == "cpu" else numel
    for start in range(0, numel, max(width, 1)):
        index = torch.arange(start, min(start + width, numel), dtype=torch.int64, device=device)
        index = index if place is None else place(index)
        rows = max(1, _CHUNK // len(index)) if device.type == "cpu" else len(keys)
        for first in range(0, len(keys), rows):
            some = slice(first, first + rows)
            bits = random_bits(index, low[some], high[some])
            torch.ge(bits, threshold, out=keep[some, start : start + len(index)])
    return keep
