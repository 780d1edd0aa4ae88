"""The steps of a rank and of the single process in one form, so that they can be compared.

    Where(step 1, "sum", "head.weight")       on a rank: elements 40 to 80, flat      in the single process: all of it
    Where(step 1, "forward", "head", m=2)     on a rank: the tape's value             in the single process: the same

Every step has its losses, its norm and the sums of its gradients.  In the single process it also has the gradients
that the optimizer gets, and the parameters after the update.  A rank has these only in the *window* of a trace, with
the marks of its tape.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.referee.tape import Where
from plait.referee.wrong import Phase
from plait.table.tensor_cut import TensorCut
from plait.tensor.pieces import piece_of

Piece = tuple[str, int, int]
"""A parameter's name, and the start and stop of its flat elements."""
TiedWeights = Mapping[str, Sequence[Sequence[str]]]


class Observation(NamedTuple):
    """A value at a place; a rank's value has the piece that it owns."""

    where: Where
    value: Tensor
    piece: Piece | None = None


@dataclass
class OneStep:
    """One step; tensors by piece on a rank, by name in the single process."""

    loss: float = math.nan
    norm: float | None = None
    made: bool = True
    """False if it was skipped."""
    losses: dict[int, float] = field(default_factory=dict)
    """Losses by global microbatch."""
    summed: dict[Any, Tensor] = field(default_factory=dict)
    marks: dict[Where, Tensor] = field(default_factory=dict)
    clipped: dict[Any, Tensor] = field(default_factory=dict)
    updated: dict[Any, Tensor] = field(default_factory=dict)
    scale: float = 1.0
    """The factor of the loss, and therefore of the contributions."""
    counts: dict[int, float] = field(default_factory=dict)
    """The number of terms in each global microbatch's loss."""


@dataclass
class Record:
    """A run of a single process; ``first`` is the step, from 0, with which it begins."""

    steps: list[OneStep] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[Any, dict[str, Tensor]] = field(default_factory=dict)
    first: int = 0
    rank: int = -1
    """-1 for a single process."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    """The values that the optimizer updates, before the first step."""

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def norms(self) -> list[float | None]:
        return [step.norm for step in self.steps]

    @property
    def gradients(self) -> list[dict[Any, Tensor]]:
        return [step.summed for step in self.steps]

    def since(self, step: int) -> "Record":
        """The same run from a step on, as a run resumed there records it."""
        return replace(self, steps=self.steps[step:], first=step)

    def before(self, step: int, name: str) -> Tensor:
        """A parameter's value before the update of a step."""
        earlier = self.steps[step - 1].updated if step else {}
        return earlier.get(name, self.initial[name])


@dataclass
class RankRecord(Record):
    """One rank's view of a run.

    ``parameters`` are whole and include buffers, as the rank gathers them at the end.  ``state`` is by piece, or by
    name if a cut parameter is updated whole.
    """

    data_rank: int = 0
    norm_pieces: list[Piece] = field(default_factory=list)
    ledger_differences: list[str] = field(default_factory=list)
    irregular: dict[str, float] = field(default_factory=dict)
    """The runs in a forward of each unit whose gathers are not predicted."""
    tensor_rank: int = 0
    cuts: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """For each cut parameter, the fields of its ``TensorCut`` and the index of this rank's piece."""
    ties: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    """The weights that several stages use, with their names, stage by stage."""

    @property
    def made(self) -> list[bool]:
        return [step.made for step in self.steps]

    def cut(self, name: str) -> tuple[TensorCut, int] | None:
        """The cut of a parameter among ranks that share it, and the index of this rank's piece."""
        if name not in self.cuts:
            return None
        *fields, index = self.cuts[name]
        return TensorCut(*fields), index

    def take(self, whole: Tensor, piece: Piece) -> Tensor:
        """The elements of a whole tensor that this rank records as a piece."""
        name, start, stop = piece
        if cut := self.cut(name):
            whole = piece_of(whole.view(cut[0].shape), *cut)
        return whole.reshape(-1)[start:stop]


def observed(run: Record) -> Iterator[Observation]:
    """All observations of a run, step by step."""
    for number, step in enumerate(run.steps, run.first):
        yield from (Observation(where, value) for where, value in step.marks.items())
        yield Observation(Where(number, "loss"), as_tensor(step.loss))
        for microbatch, loss in step.losses.items():
            yield Observation(Where(number, "loss", "", microbatch), as_tensor(loss))
        yield Observation(Where(number, "norm"), as_tensor(step.norm))
        yield from _pieces(number, "sum", step.summed)
        yield from _pieces(number, "clip", step.clipped)
        yield from _pieces(number, "update", step.updated)
    last = run.first + len(run.steps) - 1
    for name, value in (run.parameters | run.buffers).items():
        yield Observation(Where(last, "publish", name), value)
    for key, state in run.state.items():
        name, piece = _named(key)
        for part, value in state.items():
            yield Observation(Where(last, "state", name, key=part), value, piece)


def _pieces(step: int, phase: Phase, tensors: Mapping[Any, Tensor]) -> Iterator[Observation]:
    for key, value in tensors.items():
        name, piece = _named(key)
        yield Observation(Where(step, phase, name), value, piece)


def _named(key: str | Piece) -> tuple[str, Piece | None]:
    return (key, None) if isinstance(key, str) else (key[0], key)


def as_tensor(number: float | None) -> Tensor:
    """A number as a tensor; a step without a norm has NaN, which equals only NaN."""
    return torch.tensor(math.nan if number is None else number, dtype=torch.float64)
