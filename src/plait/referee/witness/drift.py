"""Bounds the difference that rounding alone may cause, by the difference of two honest runs of the same job.

    judge      the whole batch at once
    echo       the batch in parts that are added up, or in another order

Both use the witnessed parameters, and the echo is made only if a gradient seems wrong.  An honest engine may be off by
``MARGIN`` times the difference of the two.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from plait.referee.contributions import add
from plait.referee.values import MARGIN, SMALL, gap, largest
from plait.referee.witness.replay import Gradients, Replay, clipped
from plait.run.data.batches import split_samples
from plait.step.step import num_samples
from plait.torch_private import TorchDispatchMode, tree_leaves

PARTS = (2, 3, 5, 8)
"""The numbers of parts into which the echo cuts a batch if a gradient seems wrong.  How a product rounds depends on its
number of rows and the processor: some numbers round as the whole does, and would show nothing."""
BLIND = 1e-3
CERTAIN = 3 / MARGIN
"""If a job in 16 bits has a larger share, three times it is taken for rounding, not ``MARGIN`` times."""
NO_SUM = 0.05
NO_SUM_IN_16 = 0.1
"""If parts of a batch are further off than this share, they do not add up to it: the loss compares samples."""

Slack: TypeAlias = Mapping[str, float]
"""The most that rounding may change an element of each parameter's gradient, beyond a fixed tolerance."""


def added(replay: Replay, step: int, parts: Iterable[Sequence[int]], count: int) -> Gradients:
    """The sum of the gradients of some parts of a step's samples, over a count."""
    return reduce(add, (replay.part(step, samples, count).gradients for samples in parts), {})


def in_parts(replay: Replay, step: int, true: Gradients, clip: float | None, parts: int) -> Gradients:
    """Recomputes the clipped gradients ``true`` of a step as the sum over parts of the batch."""
    samples = num_samples(replay.batch(step))
    ranges = (range(first, first + number) for first, number in split_samples(samples, min(parts, samples)))
    return clipped(added(replay, step, ranges, replay.count(step)), clip, true)[0]


def other_orders(samples: Sequence[int]) -> list[list[int]]:
    """The same samples in a few other orders.  The rest of sums that cancel, as for a bias before BatchNorm, is
    rounding, which differs in each order."""
    here = list(samples)
    return [here[::-1], *(here[at:] + here[:at] for at in sorted({1, len(here) // 3, len(here) // 2}) if at)]


def in_other_orders(replay: Replay, step: int, true: Gradients, clip: float | None) -> Iterator[Gradients]:
    """Recomputes the clipped gradients ``true`` of a step from its samples in other orders."""
    for samples in other_orders(range(num_samples(replay.batch(step)))):
        yield clipped(added(replay, step, [samples], replay.count(step)), clip, true)[0]


class _Dtypes(TorchDispatchMode):
    """Notes the dtypes of all computed tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


def excused(replay: Replay, step: int, share: float) -> float:
    """The share that is taken for rounding, divided by ``MARGIN``, if parts of the batch are off by ``share``.

    In fp32 and fp64 a large share is no rounding (the loss compares samples), so it does not excuse more.
    """
    if share <= BLIND:
        return share
    with _Dtypes() as found:
        replay.part(step, None, replay.count(step))
    if found.seen & {torch.bfloat16, torch.float16}:
        return max(BLIND, CERTAIN * share) if share <= NO_SUM_IN_16 else 0.0
    return BLIND if share <= NO_SUM else 0.0


def declared(share: float) -> float:
    """The share that is excused, divided by ``MARGIN``, if a declared rounding changes a gradient by ``share``: three
    times as much; 0 if that would leave no gradient to judge."""
    return CERTAIN * share if share <= NO_SUM_IN_16 else 0.0


def apart(gradients: Gradients, true: Gradients) -> float:
    """The largest share by which a parameter's gradient differs."""
    sizes = _sizes(true)
    return max([0.0, *(gap(g, true[name]) / sizes[name] for name, g in gradients.items() if sizes[name])])


def slack_of(share: float, true: Gradients) -> Slack:
    """The slack of each gradient: ``MARGIN`` times ``share`` of its size."""
    return {name: MARGIN * share * size for name, size in _sizes(true).items()}


def _sizes(true: Gradients) -> dict[str, float]:
    overall = max(map(largest, true.values()), default=0.0)
    return {name: max(largest(g), SMALL * overall) for name, g in true.items()}
