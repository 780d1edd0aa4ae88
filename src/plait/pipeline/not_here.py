"""Tensors that replace those of another stage: they have the right shape, pass through any code, and are never read.

    h = NotHere             h = norm(h) * 2          NotHere
                            torch.ones_like(h)       a plain tensor: the shape is known here
                            if h.sum() > 0           refused: the program would branch on a placeholder
                            mask[0] = h              mask is NotHere, too

The values are NaN, or 0 if the dtype has none.  Should one get through, the loss is refused as not finite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.tensor.metadata import name_of, only_metadata
from plait.torch_private import DisableTorchFunctionSubclass

TO_PYTHON = {
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"),
    *("item", "tolist", "numpy", "equal"),
}
"""Functions that turn a tensor's values into numbers, or into a decision."""

ELSEWHERE = (
    "a value of another stage: a pipeline's block takes the carry of the one before, and nothing else of other blocks; "
    "hand it on in the carry, or train without a pipe axis"
)


class NotHere(Tensor):
    """A tensor whose values another stage has, or a tensor computed from one."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in TO_PYTHON:
            raise ValueError(f"{name_of(func)!r} reads {ELSEWHERE}")
        if only_metadata(func, args, kwargs):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        written = [t for t in (*args[:1], kwargs.get("out")) if isinstance(t, Tensor) and not isinstance(t, NotHere)]
        versions = [t._version for t in written]
        with torch.no_grad():
            out = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for tensor, version in zip(written, versions, strict=True):
            if tensor._version != version:
                if type(tensor) is not Tensor or tensor._is_view():
                    raise ValueError(
                        "the model writes a value of another stage into a tensor that this one may use: "
                        "let it make a new one, by torch.where, cat or a sum"
                    )
                tensor.__class__ = cls
        return out


def not_here(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Returns a placeholder with its own memory, so that code may write to it."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(tuple(shape), value, dtype=dtype, device=device).as_subclass(NotHere)
