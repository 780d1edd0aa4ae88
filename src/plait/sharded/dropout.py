"""Dropout with a mask that no layout changes.

An element is kept or dropped by a hash of (seed, number of the call, its place in the *whole* tensor), so every rank
draws its own piece of the same mask, whatever the cut (``forward/masks.py``):

    with dropout_stream(seed):           one stream per step: give it a seed of (your seed, step)
        loss = model(x)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch.nn.functional as F

from plait.forward.masks import box_mask, stream_key
from plait.sharded.dispatch import DIRECT, LayoutError
from plait.sharded.sharded_tensor import ShardedTensor, wrap

_KEYS: ContextVar[Iterator[int] | None] = ContextVar("dropout_stream", default=None)


@contextmanager
def dropout_stream(*seed: object) -> Iterator[None]:
    """Lets ``F.dropout`` on ShardedTensors draw by seed and number of the call; all ranks make the same calls."""
    token = _KEYS.set(stream_key(*(seed or ("",)), call) for call in count())
    try:
        yield
    finally:
        _KEYS.reset(token)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if p == 0 or not training:
        return input
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    keys = _KEYS.get()
    if keys is None or inplace or not isinstance(input, ShardedTensor):
        raise LayoutError(
            f"dropout of {getattr(input, '_spec', 'a plain tensor')!r}: a mask drawn on each rank would depend on the "
            f"layout. Draw it from the place in the whole tensor, inside `with dropout_stream(seed):`, not in place, "
            f"or use p=0 or eval()"
        )
    spec, local = input._spec, input.local
    keep = box_mask(next(keys), spec.shape, spec.start, spec.local_shape, p, local.device)
    return wrap(local * (keep.to(local.dtype) * (1 / (1 - p) if p < 1 else 0.0)), spec)


DIRECT[F.dropout] = _dropout
