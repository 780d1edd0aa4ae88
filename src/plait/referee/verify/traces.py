"""The traces of a layout and its replay, which a search for the first wrong tensor compares."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.referee.difference import Discrepancy, describe
from plait.referee.tape import Where
from plait.referee.verify.compare import BITWISE, HEARD, Measures, Pair
from plait.referee.verify.observed import RankRecord, Record, TiedWeights, observed
from plait.table.cells import EXPERTS
from plait.table.mesh import Mesh
from plait.table.region import part
from plait.tensor.pieces import piece_of
from plait.tensor.time_axis import part_of_time


class Wrong(NamedTuple):
    """A pair that is not equal; ``order`` is its place in causal order among those of its kind."""

    order: int
    pair: Pair
    discrepancy: Discrepancy

    @property
    def name(self) -> str:
        return self.pair.where.name


@dataclass(frozen=True)
class Traces:
    """The traces of some steps on every rank, and of the same steps in the single process ``one``."""

    ranks: Sequence[RankRecord]
    one: Record
    mesh: Mesh
    microbatches: int
    clip: float | None
    asked: Measures
    ties: TiedWeights
    excused: Collection[str] = ()
    """The parameters whose gradients are pure rounding: honest runs differ in them as the layout does."""

    def of(self, rank: int) -> RankRecord:
        """A rank's trace."""
        return next(trace for trace in self.ranks if trace.rank == rank)

    def within(self, where: Where) -> float:
        """max|a - b| / max|b| that counts as equal."""
        bound = self.asked.rounding if where.step == 0 else self.asked.drift
        moved = where.phase in ("update", "publish") and self.asked != BITWISE
        return max(bound, 1e-3) if moved else bound

    def discrepancy(self, pair: Pair) -> Discrepancy | None:
        """Describes the difference of a pair; None if it is equal, or cannot be compared."""
        where, ours, theirs = pair.where, pair.ours, pair.theirs
        if where.name in self.excused and where.phase in ("contribution", "sum", "clip", "update", "publish"):
            return None
        if ours is None:
            return Discrepancy("nothing", text="no rank has it")
        if theirs is None:
            return describe(ours, torch.zeros(0))
        found: Discrepancy | None
        if where.phase in HEARD:
            at_rest = where.phase == "parameter" and bool(ours.isnan().all())  # later values show if it is read
            if at_rest or self._equal_in_sum(where, theirs):
                return None
            trace = self.of(pair.rank)
            ours, theirs = self._over_time(trace, where, ours), self._over_experts(trace, where, theirs)
            found = self.compared(trace, where, ours, theirs)
        elif where.phase == "norm" and bool(ours.isnan() ^ theirs.isnan()):
            found = Discrepancy("shape", text="only one side has a norm: the other has skipped the step")
        else:
            found = describe(ours.cpu(), theirs.to(ours.dtype), self.within(where))
        return None if found is None or found.pattern == "equal" else found

    def compared(self, trace: RankRecord, where: Where, ours: Tensor, theirs: Tensor) -> Discrepancy | None:
        """Describes how a rank's value differs from the single process's; None if they cannot be compared."""
        within = self.within(where)
        if self.mesh.context > 1 and where.phase in ("forward", "backward") and theirs.shape != ours.shape:
            found = [piece for p in self._parts_of_time(trace, theirs, ours) for piece in self._pieces(trace, p, ours)]
            return min((describe(ours, piece, within) for piece in found or [theirs]), key=lambda d: d.max_rel)
        if where.phase in ("parameter", "contribution") and (cut := trace.cut(where.name)) is not None:
            theirs = piece_of(theirs.view(cut[0].shape), *cut)
        elif self.mesh.tensor > 1:
            tried = (describe(ours, piece, within) for piece in self._pieces(trace, theirs, ours))
            return min(tried, key=lambda d: d.max_rel, default=None)
        return describe(ours, theirs, within)

    def _pieces(self, trace: RankRecord, whole: Tensor, ours: Tensor) -> Iterator[Tensor]:
        """The parts of a whole activation that a tensor rank may hold: all of it, or a part of one dim."""
        if whole.shape == ours.shape:
            yield whole
            return
        if whole.dim() != ours.dim():
            return
        ranges = [cut.ranges(index) for cut, index in filter(None, map(trace.cut, trace.cuts))]  # as parameters are cut
        dims = [d for d in range(whole.dim()) if whole.shape[d] != ours.shape[d]]
        for dim in dims if len(dims) == 1 else ():
            even = part(whole.shape[dim], self.mesh.tensor, trace.tensor_rank)
            for runs in dict.fromkeys([(even,), *ranges]):
                size = sum(stop - start for start, stop in runs)
                if size == ours.shape[dim] and max(stop for _, stop in runs) <= whole.shape[dim]:
                    yield torch.cat([whole.narrow(dim, start, stop - start) for start, stop in runs], dim)

    def _parts_of_time(self, trace: RankRecord, whole: Tensor, ours: Tensor) -> Iterator[Tensor]:
        """The parts of an activation that a rank of a context axis may hold: its blocks of a dim that is shorter."""
        ways, index = self.mesh.context, self.mesh.index(trace.rank, ("context",))
        for dim, size in enumerate(whole.shape if whole.dim() == ours.dim() else ()):
            for samples in range(1, size + 1 if dim == 0 and size != ours.shape[0] else 2):  # [samples * time, ...]
                if size != ours.shape[dim] and size % (2 * ways * samples) == 0:
                    yield part_of_time(whole.unflatten(dim, (samples, -1)), ways, index, dim + 1).flatten(dim, dim + 1)

    def _over_time(self, trace: RankRecord, where: Where, ours: Tensor) -> Tensor:
        """Adds up the shares of a context group in a sum over time: a parameter's gradient, or a number."""
        a_sum = where.phase == "contribution" or (where.phase == "forward" and ours.dim() == 0)
        if self.mesh.context == 1 or not a_sum:
            return ours
        place = trace.tensor_rank, trace.cut(where.name)
        group = [other for other in self.ranks if (other.tensor_rank, other.cut(where.name)) == place]
        steps = [other.steps[where.step - other.first] for other in group]
        alike = [step.marks[where] for step in steps if where in step.marks]
        return torch.stack(alike).sum(0)

    def _over_experts(self, trace: RankRecord, where: Where, theirs: Tensor) -> Tensor:
        """Adds up the contributions of a turn's microbatches to the experts that ranks of an expert axis share."""
        cut = trace.cut(where.name) if self.mesh.expert > 1 and where.phase == "contribution" else None
        if cut is None or cut[0].ways != self.mesh.count(EXPERTS.cut):
            return theirs
        turn = (where.microbatch or 0) % self.microbatches
        places = {self.mesh.data_rank(rank) for rank in self.mesh.group(trace.rank, ("expert",))}
        marks = self.one.steps[where.step].marks
        added = [where._replace(microbatch=place * self.microbatches + turn) for place in sorted(places)]
        return torch.stack([marks[one] for one in added if one in marks]).sum(0)

    def _equal_in_sum(self, where: Where, theirs: Tensor) -> bool:
        """True if a gradient is pending over the tensor ranks: each has a term of the right sum."""
        if self.mesh.tensor == 1 or where.phase not in ("backward", "contribution"):
            return False
        terms = [one.value for trace in self.ranks for one in observed(trace) if one.where == where]
        if any(term.shape != theirs.shape for term in terms):
            return False
        return describe(torch.stack(terms).sum(0), theirs, self.within(where)).pattern == "equal"
