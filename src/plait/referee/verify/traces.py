"""The traces of a layout beside that of its replay: what a search for the first wrong tensor compares."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.referee.difference import Discrepancy, describe
from plait.referee.tape import Mark
from plait.referee.verify.compare import BITWISE, Measures
from plait.referee.verify.reference import Piece, TiedWeights
from plait.referee.verify.traced import RankTrace, ReferenceTracer
from plait.run.config import RunConfig
from plait.table.layout import part
from plait.tensor.pieces import piece_of


class Wrong(NamedTuple):
    """A tensor of a rank that is not what it should be; ``order`` is its place in causal order."""

    order: int
    rank: int
    name: str
    discrepancy: Discrepancy
    mark: Mark | None = None
    piece: Piece | None = None


@dataclass(frozen=True)
class Traces:
    """What every rank did in some steps, and what the single process ``one`` did."""

    ranks: Sequence[RankTrace]
    one: ReferenceTracer
    config: RunConfig
    asked: Measures
    ties: TiedWeights
    rounding: Collection[str] = ()
    """Parameters whose gradients are made of rounding alone: honest runs differ in them as the layout does."""

    @property
    def tensor(self) -> int:
        """The size of the tensor axis."""
        return self.config.parsed_mesh.tensor

    def of(self, rank: int) -> RankTrace:
        """A rank's trace."""
        return next(trace for trace in self.ranks if trace.rank == rank)

    def within(self, step: int, *, moved: bool = False) -> float:
        """max|a - b| / max|b| that counts as equal; ``moved``: of parameters, after an update."""
        bound = self.asked.rounding if step == 0 else self.asked.drift
        return bound if self.asked == BITWISE or not moved else max(bound, 1e-3)

    def before(self, step: int, name: str) -> Tensor:
        """A parameter's value before the update of a step, in the single process."""
        earlier = self.one.steps.get(step - 1)
        return (self.one.initial if earlier is None else earlier.updated)[name]

    def compared(self, trace: RankTrace, mark: Mark, ours: Tensor, theirs: Tensor, within: float) -> Discrepancy | None:
        """How a value of a rank differs from the single process's; None where they cannot be compared."""
        if mark.event in ("parameter", "contribution") and (cut := trace.cut(mark.name)) is not None:
            theirs = piece_of(theirs.view(cut.shape), cut, trace.tensor_rank)
        elif self.tensor > 1:
            ranges = [c.ranges(trace.tensor_rank) for name in trace.cuts if (c := trace.cut(name))]
            pieces = pieces_of(theirs, ours, ranges, (self.tensor, trace.tensor_rank))
            return min((describe(ours, piece, within) for piece in pieces), key=lambda d: d.max_rel, default=None)
        return describe(ours, theirs, within)

    def equal_in_sum(self, mark: Mark, step: int, theirs: Tensor) -> bool:
        """Whether a gradient is pending over the tensor ranks: each has a term of the right sum."""
        if self.tensor == 1 or mark.event not in ("gradient", "contribution"):
            return False
        terms = [t.steps[step].marks[mark] for t in self.ranks if mark in t.steps[step].marks]
        if any(term.shape != theirs.shape for term in terms):
            return False
        return describe(torch.stack(terms).sum(0), theirs, self.within(step)).pattern == "equal"


def pieces_of(
    whole: Tensor, ours: Tensor, ranges: Sequence[tuple[tuple[int, int], ...]], of: tuple[int, int]
) -> Iterator[Tensor]:
    """What a tensor rank may hold of a whole activation: all of it, or a part of one dim.

    Args:
        ranges: how the parameters of the model are cut, on this rank.
        of: how many tensor ranks there are, and which this is.
    """
    if whole.shape == ours.shape:
        yield whole
        return
    if whole.dim() != ours.dim():
        return
    dims = [d for d in range(whole.dim()) if whole.shape[d] != ours.shape[d]]
    for dim in dims if len(dims) == 1 else ():
        for runs in dict.fromkeys([(part(whole.shape[dim], *of),), *ranges]):
            size = sum(stop - start for start, stop in runs)
            if size == ours.shape[dim] and max(stop for _, stop in runs) <= whole.shape[dim]:
                yield torch.cat([whole.narrow(dim, start, stop - start) for start, stop in runs], dim)
