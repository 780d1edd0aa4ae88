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
from plait.torch_private import DisableTorchFunction, is_packed, shapes_before, slopes, stack_of

Reduction = Literal["mean", "sum"]

_MEAN, _SUM = 1, 2
"""The codes of the reductions of torch's loss functions."""
_MEANS = ("MeanBackward", "DotBackward", "MvBackward", "MmBackward", "BmmBackward")  # a product may be a weighted mean

LOOKS = 8
"""The number of losses that are checked: it takes time, and on a GPU each check makes this thread wait."""


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


def as_sum(loss: Tensor, count: int, reduction: Reduction | None, looks: int = LOOKS) -> Tensor:
    """The sum of a loss's ``count`` terms, checked if ``looks`` losses were checked before."""
    if looks < LOOKS and reduction != "sum":
        check_terms(loss, count, reduction)
    if reduction == "mean":
        if looks < LOOKS or not loss.is_cuda:
            check_weight(loss, count)
        return loss * count if count else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0  # without terms a mean is NaN
    if reduction not in (None, "sum"):
        raise ValueError(f'reduction={reduction!r}: it must be "mean" or "sum"')
    return loss


def check_terms(loss: Tensor, count: int, reduction: Reduction | None = None) -> None:
    """Raises ValueError for a mean that is a sum, and for a sum in which a mean of several terms lacks their number,
    unless it adds up as many means as terms, as a loop over samples does."""
    found = addends(loss, count) if count > 1 else []
    kinds = {kind: name for name, kind in found}
    if reduction == "mean" and kinds.keys() == {"sum"}:
        raise ValueError(
            f"the loss is a sum ({kinds['sum']}), and is taken as a mean of {count} terms, so it would count {count} "
            f'times: write reduction="sum", or give the loss_fn without plait.sum_of_mean. Where it is a mean after '
            f"all, do so with loss * {count}"
        )
    means = [name for name, kind in found if kind == "mean" or (kind == "by count" and "sum" not in kinds)]
    if reduction is None and len(means) % max(count, 1):
        raise ValueError(
            f"the loss is a mean ({means[0]}), and is taken as a sum of {count} terms, so it would be divided "
            f'twice: call engine.backward(loss, count, reduction="mean"); for a loss_fn, plait.sum_of_mean makes a sum '
            f"of it. A mean beside a sum lacks the factor {count}. Where it is a sum of {count} terms after all, write "
            f'reduction="sum", or loss.sum()'
        )


def returning_sums(loss_fn: LossFn, count_fn: Callable[[Any], int]) -> LossFn:
    """Returns the same loss function, with an error if it returns a mean."""

    def checked(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        if isinstance(loss, Tensor) and loss.dim() == 0:
            check_terms(loss, count_fn(batch))
        return loss

    return checked


def addends(loss: Tensor, count: int) -> list[tuple[str, str]]:
    """The name of each node that a loss adds up, with its factor, and what it is in the loss, if that is clear.

    A sum divided by the count is a mean, unless it is beside a sum.  A sum of a stack adds up its scalars.  A mean is
    not clear if its factor is nearer to the number of its terms than to 1.  A sum of one number declares a sum.
    """
    parts, seen, found = [(loss.grad_fn, 1.0, 1.0)], set[Any]({None}), []
    with DisableTorchFunction(), torch.no_grad():  # the look is no part of the forward
        for node, factor, grown in parts:  # it grows where a scalar is made of scalars: by a product, a sum, a cast
            if node in seen:
                continue
            seen.add(node)
            node = stack_of(node)
            name, shapes, clear = type(node).__name__, shapes_before(node), ""
            reduction = getattr(node, "_saved_reduction", name.startswith(_MEANS) * _MEAN)
            sums = reduction == _SUM or name.startswith(("SumBackward", "NansumBackward"))
            if sums or (reduction == _MEAN and math.prod(shapes[0]) > 1):
                divided, of_term = grown / abs(factor), (*shapes[0][1:], math.prod(shapes[0][1:]))
                by_count = count > 2 and math.isclose(divided, count, rel_tol=1e-4) and count not in of_term
                if not 1 < grown >= math.sqrt(min(count, math.prod(shapes[0]))):
                    clear = "mean" if not sums else "by count" if by_count else "sum" if divided < count else ""
            elif before := slopes(node):
                parts += [(one, factor * by, grown * max(1, abs(by))) for one, by in before if by]
                continue
            found.append((name if factor == 1 else f"{name} times {factor:.4g}", clear))
    return found
