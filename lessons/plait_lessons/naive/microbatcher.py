"""A batch in microbatches, and gradients that add up to the batch's.

    7 samples in 3     0 1 2 | 3 4 | 5 6           3 samples in 5     0 | 1 | 2 | - | -

Losses are *sums*, and so are gradients: the sum over a batch is the sum over its microbatches, however it was cut.  The
mean is taken once, over the count of the whole batch, by seeding every backward with 1/count.

    microbatch      rows with a loss     loss sum      its mean         right: (8 + 1) / (4 + 1) = 1.8
    0               4                    8             2                mean of means: (2 + 1) / 2 = 1.5
    1               1                    1             1

A mean of means weighs a row by the company it was cut with, so it changes with the cut as soon as counts differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from plait_lessons.naive.hand_off import LossOf

Pair = tuple[Tensor, Any]
"""A microbatch as the model's input and the target of its loss."""


def split(batch: Any, num_microbatches: int) -> list[Any]:
    """The batch cut along the first dim in contiguous microbatches, the first ones a sample longer.

    Args:
        batch: a tensor, or tuples, lists and dicts of tensors, all with as many samples in the first dim.
        num_microbatches: more than there are samples leaves the last ones empty.

    Raises:
        ValueError: no microbatch, no tensor, or tensors that do not agree on the number of samples.
    """
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} microbatches: a step needs at least one")
    leaves, tree = tree_flatten(batch)
    odd = [leaf for leaf in leaves if not isinstance(leaf, Tensor) or leaf.dim() == 0]
    if odd or not leaves:
        what = f"a {type(odd[0]).__name__} without a first dim" if odd else "no tensor"
        raise ValueError(f"the batch holds {what}: give tensors whose first dim are the samples")
    sizes = sorted({len(leaf) for leaf in leaves})
    if len(sizes) > 1:
        raise ValueError(
            f"the batch's tensors have {' and '.join(map(str, sizes))} samples: give each the same first dim"
        )
    cuts = [leaf.tensor_split(num_microbatches) for leaf in leaves]
    return [tree_unflatten(list(parts), tree) for parts in zip(*cuts, strict=True)]


def join(microbatches: Sequence[Any]) -> Any:
    """The microbatches, or what a model made of them, end to end again.

    Raises:
        ValueError: none at all, or microbatches that are built differently.
    """
    if not microbatches:
        raise ValueError("no microbatches to join: give at least one")
    flat = [tree_flatten(microbatch) for microbatch in microbatches]
    tree = flat[0][1]
    for number, (_, other) in enumerate(flat):
        if other != tree:
            raise ValueError(f"microbatch {number} is built as {other}, microbatch 0 as {tree}: build them alike")
    return tree_unflatten([torch.cat(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)], tree)


def total_count(microbatches: Sequence[Pair], count: Callable[[Any], int]) -> int:
    """How many terms the losses of all microbatches sum; what every gradient is divided by.

    Raises:
        ValueError: none.
    """
    total = sum(count(target) for _, target in microbatches)
    if not total:
        raise ValueError(f"nothing in the {len(microbatches)} microbatches has a loss: a mean needs at least one term")
    return total


def accumulate(
    model: nn.Module, microbatches: Sequence[Pair], loss_of: LossOf, count: Callable[[Any], int]
) -> tuple[Tensor, ...]:
    """Forward and backward of each microbatch in turn; leaves the gradient of the mean over all of them.

    What every pipeline is held against: the whole model, gradients added in the order of microbatches.

    Args:
        loss_of: the *sum* of a microbatch's losses, from the model's output and the target.
        count: how many terms that sum has, from the target.

    Returns:
        Each microbatch's loss sum.
    """
    total = total_count(microbatches, count)
    losses = []
    for x, target in microbatches:
        loss = loss_of(model(x), target)
        loss.backward(torch.full_like(loss, 1 / total))
        losses.append(loss.detach())
    return tuple(losses)


def mean_of_means(
    model: nn.Module, microbatches: Sequence[Pair], loss_of: LossOf, count: Callable[[Any], int]
) -> tuple[Tensor, ...]:
    """Wrong where counts differ: each microbatch's mean, divided by the number of microbatches.

    A microbatch in which nothing counts makes every gradient NaN.
    """
    losses = []
    for x, target in microbatches:
        loss = loss_of(model(x), target)
        (loss / count(target) / len(microbatches)).backward()
        losses.append(loss.detach())
    return tuple(losses)
