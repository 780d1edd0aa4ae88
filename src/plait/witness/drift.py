"""How far rounding alone may carry a run away from the judge's, where its parameters were not kept whole.

    judge      the whole batch at once               at its own parameters, but for the elements that were kept
    echo       the same in two halves, added         at its own parameters

Both are honest.  After a few steps of Adam, which makes a whole step of the rounding of a tiny gradient, they differ by
more than one step's rounding, and so may an honest engine: what lies between the two, ``MARGIN`` times, is none of its
faults.  Where it is more than ``BLIND`` of a gradient, nothing can be said any more.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.engine.step import num_samples
from plait.job.job import Job
from plait.witness.judgement import SMALL, largest
from plait.witness.replay import Gradients, Replay, clipped

MARGIN = 10.0
BLIND = 1e-3

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
    """What rounding may have made of each parameter's tensors; nothing where they were kept whole."""

    gradient: Mapping[str, float] = field(default_factory=dict)
    """Of an element."""
    update: Mapping[str, float] = field(default_factory=dict)
    """Of an element, by an optimizer that does not go element by element."""
    norm: Mapping[str, float] = field(default_factory=dict)
    """Of the norm of the parameter after the update."""


class Echo:
    """A second honest run of the same job, in step with the judge's own."""

    def __init__(self, job: Job, start: Mapping[str, Tensor]) -> None:
        self._replay = Replay(job)
        self._replay.set(start)
        self._before = {name: value.clone() for name, value in start.items()}
        self._gradients: Gradients = {}
        self._apart: dict[str, float] = {}
        self.share = 0.0
        """Of a gradient, by which the two runs have been apart: in the step and the parameter where it was most, for it
        goes up and down."""

    def gradient(self, step: int, true: Gradients, clip: float | None) -> Slack:
        """What rounding may have made of the clipped gradients ``true`` of a step."""
        replay, count = self._replay, self._replay.count(step)
        samples = num_samples(replay.batch(step))
        halves = [range(samples // 2), range(samples // 2, samples)] if samples > 1 else [range(samples)]
        sums: Gradients = {}
        for half in halves:
            for name, g in replay.part(step, half, count).gradients.items():
                sums[name] = sums[name] + g if name in sums else g
        self._gradients, _, _ = clipped({name: g for name, g in sums.items() if name in true}, clip)
        overall = max(map(largest, true.values()), default=0.0)
        sizes = {name: max(largest(g), SMALL * overall) for name, g in true.items()}
        shares = [largest(g - true[name]) / sizes[name] for name, g in self._gradients.items() if sizes[name]]
        self.share = max([self.share, *shares])
        return Slack(gradient={name: MARGIN * self.share * size for name, size in sizes.items()})

    def update(self, due: Gradients, start: Mapping[str, Tensor], given: Collection[str]) -> Slack:
        """What rounding may have made of parameters that were ``start`` and are ``due``; those that are ``given`` a
        gradient are updated."""
        after = self._replay.update({name: g for name, g in self._gradients.items() if name in given})
        for name, value in after.items():
            self._apart[name] = max(self._apart.get(name, 0.0), (value - due[name]).double().norm().item())
        update = {}
        if type(self._replay.optimizer) not in ELEMENTWISE:
            update = {
                name: MARGIN * largest((value - self._before[name]) - (due[name] - start[name]))
                for name, value in after.items()
            }
        self._before = after
        return Slack(update=update, norm={name: MARGIN * gap for name, gap in self._apart.items()})
