"""Dropout whose mask no layout changes.

An element is kept or dropped by a hash of (seed, number of the call, its place in the *whole* tensor), so every rank
draws its own piece of one and the same mask, whatever the cut:

    key  <- blake2b(seed, call)          place <- index of the element in the whole tensor, counted row by row
    keep <- mix(mix(place xor key_low) + key_high) >= p * 2**32

    with dropout_stream(seed):           one stream per step: give it a seed of (your seed, step)
        loss = model(x)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.tensor.dispatch import DIRECT, LayoutError
from plait.tensor.sharded import ShardedTensor, wrap
from plait.tensor.spec import Spec

_STREAM: ContextVar[Iterator[int] | None] = ContextVar("dropout_stream", default=None)
_LOW32 = 0xFFFFFFFF


@contextmanager
def dropout_stream(*seed: object) -> Iterator[None]:
    """Inside, ``F.dropout`` on ShardedTensors draws, from the seed and the number of the call.

    All ranks make the same calls in the same order.
    """
    text = "\x1f".join(map(str, seed))
    keys = (
        int.from_bytes(hashlib.blake2b(f"{text}\x1f{k}".encode(), digest_size=8).digest(), "little") for k in count()
    )
    token = _STREAM.set(keys)
    try:
        yield
    finally:
        _STREAM.reset(token)


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x6C078965)):
        x = ((x ^ (x >> shift)) * factor) & _LOW32
    return x ^ (x >> 16)


def keep_mask(spec: Spec, key: int, p: float, device: torch.device) -> Tensor:
    """This rank's piece of the mask of a whole tensor: bool, True is kept."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, length in zip(spec.shape, spec.start, spec.local_shape, strict=True):
        place = place[..., None] * size + torch.arange(start, start + length, device=device)
    bits = _mix((place & _LOW32) ^ (key & _LOW32)) + (key >> 32) + (place >> 32)
    return _mix(bits & _LOW32) >= int(p * 2**32)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if p == 0 or not training:
        return input
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    stream = _STREAM.get()
    if stream is None or inplace or not isinstance(input, ShardedTensor):
        raise LayoutError(
            f"dropout of {getattr(input, '_spec', 'a plain tensor')!r}: a mask drawn on each rank would depend on the "
            f"layout. Draw it from the place in the whole tensor, inside `with dropout_stream(seed):`, not in place, "
            f"or use p=0 or eval()"
        )
    spec, local = input._spec, input.local
    keep = keep_mask(spec, next(stream), p, local.device)
    return wrap(local * (keep.to(local.dtype) * (1 / (1 - p) if p < 1 else 0.0)), spec)


DIRECT[F.dropout] = _dropout
