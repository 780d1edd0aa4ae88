"""The ends of a backward: the seed at the loss, and the gradients that a leaf accepts.

loss            seed, as the dual table requires
pending         1 on every rank
replicated      1 at index 0 of the axis, 0 elsewhere: the ranks' gradients are shares of one sum
cut             1 on the rank that holds the element
"""

from typing import Any

import torch
from torch import Tensor

from plait.sharded.dispatch import LayoutError, spec_of
from plait.sharded.redistribute import NOTE, moved
from plait.sharded.spec import Spec
from plait.torch_private import DisableTorchFunctionSubclass

_grad: Any = Tensor.grad


def seed(spec: Spec, like: Tensor, gradient: Tensor | None) -> Tensor:
    """Returns this rank's piece of the gradient of a value like ``like``, to start a backward; sends nothing.

    ``gradient`` must be in the dual layout or replicated (plain or not), or this raises LayoutError; None is 1, for a
    value of one element.
    """
    with DisableTorchFunctionSubclass(), torch.no_grad():
        if gradient is None:
            if spec.shape.numel() != 1:
                raise RuntimeError(f"backward from {spec!r} needs a gradient: only a tensor of one element has its own")
            gradient = torch.ones(spec.shape, dtype=like.dtype, device=like.device)
        start = spec_of(gradient) or spec.cache.replicated(gradient)
        piece = gradient.as_subclass(Tensor)
        if start is spec.dual:
            return piece
        if start.shape != spec.shape or start.layout.cut or start.pending:
            raise LayoutError(
                f"backward from {spec!r} needs a gradient of its shape, in its dual layout '{spec.dual.layout}' or "
                f"replicated, not {start!r}: .redistribute('{spec.dual.layout}') it"
            )
        return moved(piece, start, spec.dual, NOTE)


def may_be_set(spec: Spec, gradient: Any) -> None:
    """Refuses a gradient that is neither in the layout of the value nor in its dual."""
    if gradient is not None and spec_of(gradient) not in (spec, spec.dual):
        raise LayoutError(
            f"the gradient of {spec!r} is a ShardedTensor in the same layout, or in '{spec.dual.layout}', not "
            f"{spec_of(gradient) or 'a plain tensor'!r}"
        )


def not_summed_already(x: Any) -> None:
    """Refuses, after a backward came to a leaf, that shares were added to a gradient that was summed and set."""
    with DisableTorchFunctionSubclass():
        spec = spec_of(_grad.__get__(x))
    if spec is not None and spec is not x._spec.dual:
        raise LayoutError(
            f"backward adds a gradient in layout '{x._spec.dual.layout}' to one that was set in '{spec.layout}': "
            f"set x.grad = None (optimizer.zero_grad()) before the next backward"
        )
