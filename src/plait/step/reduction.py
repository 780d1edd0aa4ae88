"""Turns a mean loss into the sum of its terms, which the step divides once by the global count.

    F.cross_entropy(out, y)                    NllLossBackward0, reduction 1     a mean
    (out - y).square().mean()                  MeanBackward0                     a mean
    (out - y).square().sum()                   SumBackward0                      a sum

A mean that is taken for a sum would be divided twice, without any sign of it.  So the engine reads the loss's last
operation from autograd, unless the caller names the reduction.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from plait.pipeline.stage import LossFn
from plait.step.step import whole_count
from plait.torch_private import DisableTorchFunction

Reduction = Literal["mean", "sum"]

_MEAN = 1
"""The code of the mean among the reductions of torch's loss functions."""


def check_weight(loss: Tensor, count: int) -> None:
    """Raises ValueError for a mean by torch's cross entropy in which targets are ignored, or classes have weights, so
    that its weight is not the count: mean * count would not be the sum of its terms.

    A single term has no weights to compare: a count of 1 declares that means are to be averaged.
    """
    node: Any = loss.grad_fn
    if count < 2 or not type(node).__name__.startswith("NllLoss") or _is_packed(node):
        return
    targets, weights = node._saved_target, node._saved_weight
    counted = targets[targets != node._saved_ignore_index]
    weight = float(len(counted) if weights is None else weights.double()[counted].sum())
    uneven = weights is not None or len(counted) < targets.numel()
    if weight and uneven and abs(weight / count - 1) > 1e-6:
        ignored = targets.numel() - len(counted)
        over = f"{ignored} of {targets.numel()} targets are ignored" if weights is None else "classes have weights"
        raise ValueError(
            f"the loss is a mean in which {over}: its weight is {weight:.6g}, and its count {count}, so the sum over "
            f"microbatches and ranks would not be a mean of all targets. {ADVICE}"
        )


def terms_of(loss: Tensor, count: int | None, retain_graph: bool | None) -> int:
    """The number of terms of a loss, checked before its backward in a program's own loop.

    Raises:
        ValueError: no count, a negative one or a fraction, a loss that is not a scalar, a graph to be kept.
    """
    if count is None:
        raise ValueError(
            "engine.backward(loss) lacks the number of terms of the loss, by which ranks are weighed: write "
            'engine.backward(loss, count, reduction="mean"), as with count = y.numel()'
        )
    if retain_graph:
        raise ValueError(
            "retain_graph=True is for a second backward of one forward, whose gradients the engine would sum "
            "twice: add the losses up and call engine.backward once, or run the forward again"
        )
    if loss.dim() != 0:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}: return the sum over the microbatch, a scalar")
    return whole_count(count)


ADVICE = (
    "Count the targets that the loss counts, those that are not ignored, as in (y != -100).sum(). With class weights "
    'take reduction="sum" of cross_entropy, divide it by the weights of all targets of the step on all ranks '
    "(engine.sum), and give a count that is 1 in one microbatch of one rank and 0 in all others"
)


def _is_packed(node: Any) -> bool:
    """True if hooks (a checkpoint's) hold the tensors that a node has saved, and recompute them on every access."""
    try:
        node._raw_saved_target.register_hooks(_itself, _itself)
    except RuntimeError:  # it has hooks already
        return True
    return False


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def as_sum(loss: Tensor, count: int, reduction: Reduction | None) -> Tensor:
    """The sum of a loss's ``count`` terms; without a reduction, the loss itself, unless it is seen to be a mean.

    Raises:
        ValueError: another reduction, a loss that is a mean but was not declared one, or a mean of other weights.
    """
    if reduction == "mean":
        return loss * count if count else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0  # without terms a mean is NaN
    if reduction is None:
        check_sum(loss, count)
    elif reduction != "sum":
        raise ValueError(f'reduction={reduction!r}: it must be "mean" or "sum"')
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
    """Returns the same loss function, with an error if it returns a mean."""

    def checked(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        with DisableTorchFunction():  # the engine's own check is not a part of the forward
            if isinstance(loss, Tensor) and is_mean(loss):
                check_sum(loss, count_fn(batch))
        return loss

    return checked


def is_mean(loss: Tensor) -> bool:
    """True if the loss's last operation takes a mean."""
    node = loss.grad_fn
    return type(node).__name__.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
