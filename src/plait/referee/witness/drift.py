"""How much of a difference rounding alone may be: what two honest runs of the same job differ by.

    judge      the whole batch at once
    echo       the same in parts, added; or in another order

Both are at the witnessed parameters, and the echo is made only where a gradient seems wrong.  An honest engine may be
off by ``MARGIN`` times what the two differ by.
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
"""Into which a batch is cut for the echo, and where a gradient seems wrong.  How a product of so many rows is rounded
depends on the processor: of some it is as in the whole, and that alone would say nothing."""
BLIND = 1e-3
CERTAIN = 3 / MARGIN
"""Where a job in 16 bits makes a larger share, three times it is taken for rounding, not ``MARGIN`` times."""
NO_SUM = 0.05
NO_SUM_IN_16 = 0.1
"""Parts of a batch that are further off than this share do not add up to it: the loss compares samples."""

Slack: TypeAlias = Mapping[str, float]
"""Bound by which rounding may change an element of each parameter's gradient, beyond a fixed tolerance."""


def added(replay: Replay, step: int, parts: Iterable[Sequence[int]], count: int) -> Gradients:
    """The sum of the gradients of some parts of a step's samples, over a count."""
    return reduce(add, (replay.part(step, samples, count).gradients for samples in parts), {})


def in_parts(replay: Replay, step: int, true: Gradients, clip: float | None, parts: int) -> Gradients:
    """The clipped gradients ``true`` of a step once more, from parts of the batch that are added."""
    samples = num_samples(replay.batch(step))
    ranges = (range(first, first + number) for first, number in split_samples(samples, min(parts, samples)))
    return clipped(added(replay, step, ranges, replay.count(step)), clip, true)[0]


def other_orders(samples: Sequence[int]) -> list[list[int]]:
    """The same samples in a few other orders: what is left of sums that cancel, as in a bias before BatchNorm, is
    rounding, and another one in each."""
    here = list(samples)
    return [here[::-1], *(here[at:] + here[:at] for at in sorted({1, len(here) // 3, len(here) // 2}) if at)]


def in_other_orders(replay: Replay, step: int, true: Gradients, clip: float | None) -> Iterator[Gradients]:
    """The clipped gradients ``true`` of a step once more, from its samples in other orders."""
    for samples in other_orders(range(num_samples(replay.batch(step)))):
        yield clipped(added(replay, step, [samples], replay.count(step)), clip, true)[0]


class _Dtypes(TorchDispatchMode):
    """Notes those of all that is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


def excused(replay: Replay, step: int, share: float) -> float:
    """The share that is taken for rounding, a ``MARGIN`` of it left out, where parts of the batch are off by ``share``.

    In fp32 and fp64 a large one is no rounding (the loss compares samples), and so does not excuse more.
    """
    if share <= BLIND:
        return share
    with _Dtypes() as found:
        replay.part(step, None, replay.count(step))
    if found.seen & {torch.bfloat16, torch.float16}:
        return max(BLIND, CERTAIN * share) if share <= NO_SUM_IN_16 else 0.0
    return BLIND if share <= NO_SUM else 0.0


def declared(share: float) -> float:
    """The share that is taken for a rounding that the loop declares, which takes a gradient by ``share``: three times
    as much, a ``MARGIN`` left out; none where it would leave no gradient to judge."""
    return CERTAIN * share if share <= NO_SUM_IN_16 else 0.0


def apart(gradients: Gradients, true: Gradients) -> float:
    """The share by which a gradient differs, of the parameter where it is most."""
    sizes = _sizes(true)
    return max([0.0, *(gap(g, true[name]) / sizes[name] for name, g in gradients.items() if sizes[name])])


def slack_of(share: float, true: Gradients) -> Slack:
    """What rounding may have made of gradients, where it makes ``share`` of the worst."""
    return {name: MARGIN * share * size for name, size in _sizes(true).items()}


def _sizes(true: Gradients) -> dict[str, float]:
    overall = max(map(largest, true.values()), default=0.0)
    return {name: max(largest(g), SMALL * overall) for name, g in true.items()}
