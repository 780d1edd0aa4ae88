"""How much of a difference rounding alone may be: what two honest runs of the same job differ by.

    judge      the whole batch at once               a few elements: at its own parameters, but for those that were kept
    echo       the same in parts, added              at its own parameters

Where everything was kept both are at the witnessed parameters, and the echo is asked only where a gradient seems wrong:
of a model that makes much of rounding it says how much.  Where a few elements were kept, it trains beside the judge.
After a few steps of Adam, which makes a whole step of the rounding of a tiny gradient, they differ by more than one
step's rounding, and so may an honest engine: what lies between the two, ``MARGIN`` times, is none of its faults.  Where
it is more than ``BLIND`` of a gradient, nothing can be said any more.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.referee.rounding import MARGIN, SMALL
from plait.referee.values import gap, gaps, largest
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

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers in which an element's update depends on that element's gradients alone."""


@dataclass(frozen=True)
class Slack:
    """What rounding may have made of each parameter's tensors, beyond a fixed tolerance."""

    gradient: Mapping[str, float] = field(default_factory=dict)
    """Of an element."""
    update: Mapping[str, float] = field(default_factory=dict)
    """Of an element, by an optimizer that does not go element by element."""
    norm: Mapping[str, float] = field(default_factory=dict)
    """Of the norm of the parameter after the update."""


def added(replay: Replay, step: int, parts: Iterable[Sequence[int]], count: int) -> Gradients:
    """The sum of the gradients of some parts of a step's samples, over a count."""
    sums: Gradients = {}
    for samples in parts:
        for name, g in replay.part(step, samples, count).gradients.items():
            sums[name] = sums[name] + g if name in sums else g
    return sums


def in_parts(replay: Replay, step: int, true: Gradients, clip: float | None, parts: int) -> Gradients:
    """The clipped gradients ``true`` of a step once more, from parts of the batch that are added."""
    samples = num_samples(replay.batch(step))
    ranges = (range(first, first + number) for first, number in split_samples(samples, min(parts, samples)))
    return _clipped(added(replay, step, ranges, replay.count(step)), true, clip)


def other_orders(samples: Sequence[int]) -> list[list[int]]:
    """The same samples in a few other orders: what is left of sums that cancel, as in a bias before BatchNorm, is
    rounding, and another one in each."""
    here = list(samples)
    return [here[::-1], *(here[at:] + here[:at] for at in sorted({1, len(here) // 3, len(here) // 2}) if at)]


def in_other_orders(replay: Replay, step: int, true: Gradients, clip: float | None) -> Iterator[Gradients]:
    """The clipped gradients ``true`` of a step once more, from its samples in other orders."""
    for samples in other_orders(range(num_samples(replay.batch(step)))):
        yield _clipped(added(replay, step, [samples], replay.count(step)), true, clip)


def _clipped(gradients: Gradients, true: Gradients, clip: float | None) -> Gradients:
    return clipped({name: g for name, g in gradients.items() if name in true}, clip)[0]


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
    return Slack(gradient={name: MARGIN * share * size for name, size in _sizes(true).items()})


def _sizes(true: Gradients) -> dict[str, float]:
    overall = max(map(largest, true.values()), default=0.0)
    return {name: max(largest(g), SMALL * overall) for name, g in true.items()}


class Echo:
    """A second honest run of the same job, in step with the judge's own."""

    def __init__(self, replay: Replay, start: Mapping[str, Tensor]) -> None:
        self._replay = Replay(replay.job, replay.buffers)
        self._replay.set(start)
        self._before = {name: value.clone() for name, value in start.items()}
        self._gradients: Gradients = {}
        self._apart: dict[str, float] = {}
        self._parts = 0
        """Into which it cuts each batch: those of the first batch that are furthest from the whole."""
        self.share = 0.0
        """Of a gradient, by which the two runs have been apart: in the step and the parameter where it was most, for it
        goes up and down."""

    def gradient(self, step: int, true: Gradients, clip: float | None) -> Slack:
        """What rounding may have made of the clipped gradients ``true`` of a step."""
        if not self._parts:
            self._parts = max(PARTS, key=lambda n: apart(in_parts(self._replay, step, true, clip, n), true))
        self._gradients = in_parts(self._replay, step, true, clip, self._parts)
        self.share = max(self.share, apart(self._gradients, true))
        return slack_of(self.share, true)

    def update(self, due: Gradients, start: Mapping[str, Tensor], given: Collection[str]) -> Slack:
        """What rounding may have made of parameters that were ``start`` and are ``due``; those that are ``given`` a
        gradient are updated."""
        after = self._replay.update({name: g for name, g in self._gradients.items() if name in given})
        for name, value in after.items():
            self._apart[name] = max(self._apart.get(name, 0.0), gaps(value, due[name]).norm().item())
        update = {}
        if type(self._replay.optimizer) not in ELEMENTWISE:
            update = {
                name: MARGIN * gap(value - self._before[name], due[name] - start[name]) for name, value in after.items()
            }
        self._before = after
        return Slack(update=update, norm={name: MARGIN * gap for name, gap in self._apart.items()})
