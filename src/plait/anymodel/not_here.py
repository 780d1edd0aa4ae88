"""What stands for values that another stage has: of the right shape, passing through any code, and read by none.

    h = NotHere             h = norm(h) * 2          NotHere        on a stage whose links come later: not used
                            link(h)                  refused, by the link: it would compute with it
                            if h.sum() > 0           refused here: the program would go on with a number of nobody
                            mask[0] = h              mask is NotHere, too

Its values are NaN, or 0 where the dtype has none: should one get by, the loss is refused as not finite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.pipeline.blocks import TO_PYTHON

NUMBERS = {*TO_PYTHON, "equal"}
"""Functions that make numbers, or a decision, of a tensor's values."""


class NotHere(Tensor):
    """A tensor whose values another stage has, and what is made of one."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in NUMBERS:
            raise ValueError(
                f"the model asks for numbers by {func.__name__!r}, in what another stage of the pipeline has: let the "
                f"link that makes the tensor ask, or train without a pipe axis"
            )
        written = [t for t in (*args[:1], kwargs.get("out")) if isinstance(t, Tensor) and not isinstance(t, NotHere)]
        versions = [t._version for t in written]
        with torch.no_grad():
            out = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for tensor, version in zip(written, versions, strict=True):
            if tensor._version != version:
                if type(tensor) is not Tensor or tensor._is_view():
                    raise ValueError(
                        "the model writes what another stage of the pipeline has into a tensor that this one may use: "
                        "let it make a new one, by torch.where, cat or a sum"
                    )
                tensor.__class__ = cls
        return out


def not_here(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """A tensor with memory of its own, so that code may write to it."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(tuple(shape), value, dtype=dtype, device=device).as_subclass(NotHere)
