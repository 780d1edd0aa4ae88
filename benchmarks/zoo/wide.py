"""Keeps fp64: where a model's code asks for fp32 of an fp64 tensor, the tensor stays as it is.

Routers, norms and softmaxes compute in fp32 for any dtype of the model.  If a layout splits a product, or a pipeline
adds the gradients of a tensor that several stages read, sums have another order, and fp32 turns that into 1e-7, in a
right layout as in a wrong one.  So both runs are made inside of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of an fp64 tensor, or a module that has one, without a word of fp32."""

    def called(x: Any, *args: Any, **kwargs: Any) -> Any:
        own = next(iter(x.parameters()), x) if isinstance(x, nn.Module) else x
        if isinstance(own, Tensor) and own.dtype is torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(x, *args, **kwargs)

    return called


def _kept_float(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: x if x.dtype is torch.float64 else function(x, *args, **kwargs)


NAMES = [
    *((Tensor, name) for name in ("to", "type", "softmax", "sum", "float")),
    *((torch, name) for name in ("softmax", "zeros_like", "empty_like", "ones_like")),
    (torch.nn.functional, "softmax"),
    (nn.Module, "to"),
]


@contextmanager
def wide() -> Iterator[None]:
    """For the whole process, as long as it lasts."""
    before = [getattr(owner, name) for owner, name in NAMES]
    for (owner, name), function in zip(NAMES, before, strict=True):
        setattr(owner, name, _kept_float(function) if name == "float" else _kept(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(NAMES, before, strict=True):
            setattr(owner, name, function)
