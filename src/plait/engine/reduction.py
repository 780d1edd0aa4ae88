"""What a loss is of its terms: a mean becomes the sum that is divided once, by the global count.

    F.cross_entropy(out, y)                    NllLossBackward0, reduction 1     a mean
    (out - y).square().mean()                  MeanBackward0                     a mean
    (out - y).square().sum()                   SumBackward0                      a sum

A mean that is taken for a sum is divided twice, and nothing would look wrong.  So what autograd says of the loss's last
operation is read, unless the caller says what the loss is.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.engine.pipeline.stage import LossFn

Reduction = Literal["mean", "sum"]

_MEAN = 1
"""As torch's loss functions number their reductions."""


def as_sum(loss: Tensor, count: int, reduction: Reduction | None) -> Tensor:
    """The sum of a loss's ``count`` terms; without a reduction, the loss itself, if nothing speaks against it.

    Raises:
        ValueError: another reduction, or a loss that is a mean although nobody said so.
    """
    if reduction == "mean":
        return loss * count if count else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0  # without terms a mean is NaN
    if reduction is None:
        check_sum(loss, count)
    elif reduction != "sum":
        raise ValueError(f'reduction={reduction!r}: what the loss is of its terms, "mean" or "sum"')
    return loss


def check_sum(loss: Tensor, count: int) -> None:
    """Raises ValueError for a mean of several terms."""
    if count != 1 and is_mean(loss):
        raise ValueError(
            f"the loss is a mean ({type(loss.grad_fn).__name__}), and is taken as a sum of {count} terms, so it would "
            f'be divided twice: call engine.backward(loss, count, reduction="mean"); for a loss_fn, plait.sum_of_mean '
            f'makes a sum of it. Where it is a sum of {count} terms after all, write reduction="sum", or loss * 1'
        )


def returning_sums(loss_fn: LossFn, count_fn: Callable[[Any], int]) -> LossFn:
    """The same loss function, refused where it returns a mean."""

    def checked(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        with torch._C.DisableTorchFunction():  # the engine's own look is no part of the forward
            if isinstance(loss, Tensor) and is_mean(loss):
                check_sum(loss, count_fn(batch))
        return loss

    return checked


def is_mean(loss: Tensor) -> bool:
    """Whether the loss's last operation takes a mean."""
    node = loss.grad_fn
    return type(node).__name__.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
