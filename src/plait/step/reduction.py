"""Turns a mean loss into the sum of its terms, which the step divides once by the global count.

    F.cross_entropy(out, y) / 2            NllLossBackward0, reduction 1, times 0.5     a mean
    F.cross_entropy(out, y) * len(y)       the same times the count                     a sum
    (out - y).square().sum()               SumBackward0                                 a sum
    (out - y).square().sum() / len(y)      the same divided by the count                a mean

A mean that is taken for a sum would be divided twice, without any sign of it.  So the engine follows autograd from the
loss to the tensors that it reduces, unless the caller names the reduction.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.pipeline.stage import LossFn
from plait.step.step import whole_count
from plait.torch_private import DisableTorchFunction, is_packed, shapes_before, slopes

Reduction = Literal["mean", "sum"]

_MEAN, _SUM = 1, 2
"""The codes of the reductions of torch's loss functions."""


def check_weight(loss: Tensor, count: int) -> None:
    """Raises ValueError for a mean by torch's cross entropy in which targets are ignored, or classes have weights, so
    that its weight is not the count: mean * count would not be the sum of its terms.

    A single term has no weights to compare: a count of 1 declares that means are to be averaged.
    """
    node: Any = loss.grad_fn
    if count < 2 or not type(node).__name__.startswith("NllLoss") or is_packed(node):
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
            f"microbatches and ranks would not be a mean of all targets. Count the targets that the loss counts, those "
            f'that are not ignored, as in (y != -100).sum(). With class weights take reduction="sum" of cross_entropy, '
            f"divide it by the weights of all targets of the step on all ranks (engine.sum), and give a count of 1 in "
            f"one microbatch of one rank and 0 in all others"
        )


def terms_of(loss: Tensor, count: int | None, retain_graph: bool | None) -> int:
    """The number of terms of a loss, checked before its backward in a program's own loop.

    Raises:
        ValueError: no count, a negative one or a fraction, a loss that is not a scalar, a graph to be retained.
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


def as_sum(loss: Tensor, count: int, reduction: Reduction | None, *, looks: bool = False) -> Tensor:
    """The sum of a loss's ``count`` terms; ``looks``: the loss is checked."""
    if looks and reduction != "sum":
        (check_weight if reduction == "mean" else check_sum)(loss, count)
    if reduction == "mean":
        return loss * count if count else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0  # without terms a mean is NaN
    if reduction not in (None, "sum"):
        raise ValueError(f'reduction={reduction!r}: it must be "mean" or "sum"')
    return loss


def check_sum(loss: Tensor, count: int) -> None:
    """Raises ValueError for a loss that adds up a mean of several terms and no sum, or a mean without a factor.

    As many means as terms are a sum: a loop over samples adds a mean of each."""
    found = addends(loss, count) if count != 1 else []
    one_each = count > 1 and len([kind for _, _, kind in found if kind == "mean"]) % count == 0
    for name, factor, kind in () if one_each else found:
        if kind == "mean" and (abs(factor) == 1 or "sum" not in (other for _, _, other in found)):
            times = "" if factor == 1 else f" times {factor:.4g}"
            raise ValueError(
                f"the loss is a mean ({name}{times}), and is taken as a sum of {count} terms, so it would be divided "
                f'twice: call engine.backward(loss, count, reduction="mean"); for a loss_fn, plait.sum_of_mean makes a '
                f"sum of it. A mean beside a sum lacks the factor {count}. Where it is a sum of {count} terms after "
                f'all, write reduction="sum", or loss.sum()'
            )


def returning_sums(loss_fn: LossFn, count_fn: Callable[[Any], int]) -> LossFn:
    """Returns the same loss function, with an error if it returns a mean."""

    def checked(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        if isinstance(loss, Tensor) and loss.dim() == 0:
            check_sum(loss, count_fn(batch))
        return loss

    return checked


def addends(loss: Tensor, count: int) -> list[tuple[str, float, str]]:
    """The name of each mean and sum that a loss adds up, its factor, and what it is in the loss, if that is clear.

    A sum that is divided by the count is a mean.  A mean is a sum if its factor has the number of its terms in it, and
    is nearer to that than to 1, by their ratios.  The sum of one number declares a sum.
    """
    parts, seen, found = [(loss.grad_fn, 1.0, 1.0)], set[Any]({None}), []
    with DisableTorchFunction(), torch.no_grad():  # the look is no part of the forward
        for node, factor, grown in parts:  # it grows where a scalar is made of scalars: by a product, a sum, a cast
            if node in seen:
                continue
            seen.add(node)
            name, shapes = type(node).__name__, shapes_before(node)
            reduction = getattr(node, "_saved_reduction", name.startswith("MeanBackward") * _MEAN)
            sums = reduction == _SUM or name.startswith("SumBackward")
            if sums or (reduction == _MEAN and math.prod(shapes[0]) > 1):
                divided, of_term = grown / abs(factor), (*shapes[0][1:], math.prod(shapes[0][1:]))
                by_count = count > 2 and math.isclose(divided, count, rel_tol=1e-4) and count not in of_term
                scaled = 1 < grown >= math.sqrt(min(count, math.prod(shapes[0])))
                clear = "mean" if by_count or not sums else "sum" if divided < count else ""
                found.append((name, factor, "sum" if scaled else clear))
            elif shapes and all(math.prod(shape) == 1 for shape in shapes):
                parts += [(before, factor * by, grown * max(1, abs(by))) for before, by in slopes(node) if by]
    return found
