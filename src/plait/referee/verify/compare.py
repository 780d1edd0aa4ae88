"""Compares two runs: how differences are measured, and when they count as equal.

Errors are max|a - b| and max|a - b| / max|b|, tensor by tensor.  *Bitwise* means that every element is the same number.

The first comparison is of the layout with the single process that replays the layout's tree of additions.  It must be
bitwise.  But a tensor axis splits matrix products, whose sums no replay can order, so tolerances apply there.
Parameters after k steps are then compared relative to lr * k, the distance that the optimizer can have moved them,
because Adam turns the rounding noise of a gradient that should be zero into a full step.  Plain SGD does not amplify,
so its parameters must also agree within rounding.

The second comparison is of the replay with plain PyTorch, link by link, in every step:

    parameters --> loss --> gradients --> norm --> clipped gradients --> updated parameters
        each link begins with the replay's own value, so no difference grows, and one rounding tolerance fits all

A gradient that is zero by symmetry (a key's bias, which softmax cancels) is pure rounding: two right runs may differ
by all of it.  The tolerance allows a share of the largest gradient of all.  A tensor axis needs more, so a difference
beyond the tolerance is then compared with the spread of honest runs.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from plait.referee.tape import Where
from plait.referee.values import MARGIN, SMALL, last_bits, rounding, scale_of
from plait.referee.values import gap as gap_of
from plait.referee.verify.observed import Piece, RankRecord, Record, observed
from plait.referee.wrong import Phase
from plait.run.job.config import JobConfig
from plait.table.mesh import Mesh

DRIFT = {
    torch.float32: (1e-2, 0.05),
    torch.float64: (1e-8, 0.05),
    torch.bfloat16: (0.3, 2.0),
    torch.float16: (0.3, 2.0),
}
"""The ``drift`` and ``parameter`` of ``Measures`` for an optimizer that amplifies rounding; by dtype."""


@dataclass(frozen=True)
class Measures:
    """The tolerances of a comparison; all 0 requires the same bits.

    ``rounding`` bounds the first step's losses, gradients and norm, where only the order of additions differs;
    ``drift`` bounds later losses and norms and the optimizer's state, once rounding has become different steps.  Both
    are relative to the tensor.  ``parameter`` bounds the parameters, relative to ``length`` = lr * k, or to the tensor
    if that is None.
    """

    rounding: float = 0.0
    drift: float = 0.0
    parameter: float = 0.0
    length: float | None = None

    def of(self, where: Where, first: int = 0) -> float:
        """The tolerance at a place, in a run that begins with the step ``first``."""
        if where.phase == "publish":
            return self.parameter
        return self.rounding if where.phase != "state" and where.step == first else self.drift


BITWISE = Measures()


def asked(mesh: Mesh, task: JobConfig, dtype: torch.dtype, *, one_layout: bool = True) -> Measures:
    """The requirement for a replay in a dtype: the same bits, unless a tensor, context or expert axis splits sums, or
    the run was resumed in this layout from another."""
    if mesh.tensor * mesh.context * mesh.expert == 1 and one_layout:
        return BITWISE
    floor, (drift, apart) = rounding(dtype), DRIFT[dtype]
    if not task.optimizer_row.amplifies:
        return Measures(floor, 10 * floor, 10 * floor)
    return Measures(floor, drift, apart, task.update.lr * task.samples.steps)


@dataclass(frozen=True, eq=False)
class HonestRuns:
    """Honest runs around an exact one; ``unit`` is one in the last place of 1, in the dtype of the computation.

    They take nothing from a layout, because its faults would widen their spread.
    """

    exact: Record
    runs: Sequence[Record]
    unit: float

    @cached_property
    def _values(self) -> list[dict[Where, Tensor]]:
        return [{one.where: one.value for one in observed(run)} for run in (self.exact, *self.runs)]

    def spread(self, where: Where) -> float:
        """The largest difference of a run from the exact value, and at least a unit in the last place of its largest
        element, because a few runs may have the same number; 0 if no run has the value."""
        exact, *others = self._values
        if (whole := exact.get(where)) is None:
            return 0.0
        if where.phase == "norm" and bool(whole.isnan().all()):
            return math.inf
        return max(*(gap_of(other.get(where, whole), whole) for other in others), self.unit * scale_of(whole))


@dataclass(frozen=True)
class Finding:
    """One tensor (or number) compared with its reference; ``tolerance`` 0 requires the same bits.

    ``measure`` says what the tolerance bounds: ``relative`` (max|a-b| / max|b|) or ``steps`` (max|a-b| / (lr * k)).
    """

    kind: str
    name: str
    max_abs: float
    max_rel: float
    bitwise: bool
    tolerance: float
    measure: str = "relative"
    measured: float = 0.0
    spread: float = 0.0
    """The difference of honest runs, if the tolerance did not hold; ``MARGIN`` times that is allowed."""
    step: int = -1
    """From 0; -1 if the tensor belongs to no step."""
    tensor: str = ""
    """The name of the parameter, if the finding is about one."""

    @property
    def times(self) -> float:
        """The difference as a multiple of the spread."""
        if not math.isfinite(self.max_abs):
            return math.inf
        return self.max_abs / self.spread if self.spread else (math.inf if self.max_abs else 0.0)

    @property
    def equal(self) -> bool:
        within = self.tolerance > 0 and self.measured <= self.tolerance
        honest = 0 < self.spread < math.inf and self.max_abs <= MARGIN * self.spread
        return self.bitwise or within or honest

    @property
    def excused(self) -> bool:
        """True if it is beyond its tolerance, but equal because honest runs differ as much."""
        return self.equal and not self.bitwise and self.measured > self.tolerance

    @property
    def asked(self) -> str:
        """The requirement, in words."""
        unit = "" if self.measure == "relative" else " lr*k"
        if self.excused:
            return f"{MARGIN:g} spreads"
        return "bitwise" if self.tolerance == 0 else f"{self.tolerance:.0e}{unit}"


def find(
    kind: str, name: str, ours: Tensor, theirs: Tensor, tolerance: float = 0.0, beside: float | None = None,
    whole: Tensor | None = None, spread: float = 0.0, step: int = -1, tensor: str = "", measure: str = "relative",
) -> Finding:  # fmt: skip
    """Compares two tensors of one shape.

    The difference is relative to the size ``beside``, or else to the largest element of ``whole``, a tensor that has
    ``theirs`` as a piece.
    """
    if ours.numel() != theirs.numel():
        return incomparable(kind, name, step, tensor)
    gap, scale = gap_of(ours, theirs), scale_of(theirs if whole is None else whole)
    same = ours.dtype == theirs.dtype and gap == 0
    relative, measured = (gap / of if of else (math.inf if gap else 0.0) for of in (scale, beside or scale))
    return Finding(kind, name, gap, relative, same, tolerance, measure, measured, spread, step, tensor)


def incomparable(kind: str, name: str, step: int = -1, tensor: str = "") -> Finding:
    """The finding for a value without a counterpart, or with one of another shape."""
    return Finding(kind, name, math.inf, math.inf, False, 0.0, measured=math.inf, step=step, tensor=tensor)


# ---- observations against expectations --------------------------------------------------------------------------

KINDS: Mapping[Phase, str] = {
    "loss": "loss",
    "sum": "gradient",
    "norm": "norm",
    "clip": "clipped",
    "update": "update",
    "publish": "parameter",
    "state": "optimizer",
}
"""The names of phases in findings; the other phases occur only in traces."""
OF_TREE = ("loss", "norm", "sum", "publish", "state")
"""The phases of findings against the replay."""
LINKS = ("loss", "sum", "norm", "clip", "update")
"""Kinds of findings against plain PyTorch, in causal order."""
HEARD = ("parameter", "forward", "backward", "contribution")
IN_PIECES = ("sum", "clip", "update", "state")


class Pair(NamedTuple):
    """A rank's value and the single process's at the same place; None on a side that has none.

    ``rank`` is -1 if no rank has it, or not all of it; ``whole`` is the tensor that has ``theirs`` as a piece.
    """

    where: Where
    rank: int
    ours: Tensor | None
    theirs: Tensor | None
    whole: Tensor | None = None
    piece: Piece | None = None


def pairs(ranks: Sequence[Record], reference: Record) -> Iterator[Pair]:
    """Pairs every value of the ranks with the single process's."""
    expected = {one.where: one.value for one in observed(reference)}
    for record in ranks:
        for where, ours, piece in observed(record):
            whole = expected.get(where)
            if whole is None and where.phase in (*HEARD, "publish"):
                continue
            if whole is None or piece is None or not isinstance(record, RankRecord):
                yield Pair(where, record.rank, ours, whole, whole, piece)
            elif where.phase == "state" and whole.numel() != reference.parameters[where.name].numel():
                yield Pair(where, record.rank, ours, whole.reshape(-1), whole, piece)
            else:
                yield Pair(where, record.rank, ours, record.take(whole, piece), whole, piece)


def missing(ranks: Sequence[RankRecord], reference: Record) -> Iterator[Pair]:
    """The values of the single process that no rank has."""
    seen: defaultdict[Where, list[tuple[RankRecord, Piece | None]]] = defaultdict(list)
    for record in ranks:
        for where, _, piece in observed(record):
            seen[where].append((record, piece))
    for where, whole, _ in observed(reference):
        if where.phase in IN_PIECES:
            if not _cover(seen[where], reference.parameters[where.name].numel()):
                yield Pair(where, -1, None, whole)
        elif where.microbatch is None:
            there = {record.rank for record, _ in seen[where]}
            yield from (Pair(where, record.rank, None, whole) for record in ranks if record.rank not in there)
        elif where.phase == "loss" and not seen[where]:
            yield Pair(where, -1, None, whole)


def _cover(runs: Sequence[tuple[RankRecord, Piece | None]], numel: int) -> bool:
    """True if a rank has the whole, or the pieces of a parameter cover every element: of the whole, or of each tensor
    rank's piece."""
    mine = [(record, piece) for record, piece in runs if piece is not None]
    if len(mine) < len(runs):
        return True
    name = mine[0][1][0] if mine else ""
    cut = next((found[0] for record, _ in mine if (found := record.cut(name))), None)
    lengths = {None: numel} if cut is None else {i: math.prod(cut.local_shape(i)) for i in range(cut.ways)}
    for index, length in lengths.items():
        seen = torch.zeros(length, dtype=torch.bool)
        for _, start, stop in (piece for record, piece in mine if index is None or record.cut(name) == (cut, index)):
            seen[start:stop] = True
        if not seen.all():
            return False
    return True


def against_tree(
    ranks: Sequence[RankRecord], reference: Record, asked: Measures = BITWISE, honest: HonestRuns | None = None
) -> list[Finding]:
    """Compares every rank's record with the replay of the layout's own tree: bitwise, or within ``asked``.  ``honest``
    runs may excuse gradients, and the parameters and states that result from them."""
    found = []
    for pair in (*pairs(ranks, reference), *missing(ranks, reference)):
        where = pair.where
        drifted = where.phase == "sum" and where.step > reference.first and asked != BITWISE
        if where.phase in OF_TREE and not drifted:  # later gradients belong to parameters that differ
            excusing = honest if where.phase in ("sum", "publish", "state") else None
            found.append(finding(pair, asked, excusing, first=reference.first))
    return found


def links(replay: Record, plain: Record) -> list[Pair]:
    """Pairs every link of every step of the replay with plain PyTorch's, in causal order.  Steps in which plain
    PyTorch's gradients overflow their scale, as a whole batch's do before its microbatches', have no gradients."""
    names = list(reversed(replay.initial))

    def place(pair: Pair) -> tuple[int, int, int]:
        where = pair.where
        return where.step, LINKS.index(where.phase), names.index(where.name) if where.name else 0

    found = (pair for pair in pairs([replay], plain) if pair.where.phase in LINKS and pair.where.microbatch is None)
    return sorted((p for p in found if p.where.phase != "sum" or plain.steps[p.where.step].summed), key=place)


def against_plain(replay: Record, plain: Record, dtype: torch.dtype, honest: HonestRuns | None = None) -> list[Finding]:
    """Compares every link within the rounding of the dtype.  ``honest`` runs may excuse losses and gradients, as when a
    job computes partly in 16 bits, but not the first loss."""
    found = []
    for pair in links(replay, plain):
        excused = honest if pair.where.phase in ("loss", "sum") and pair.where[:2] != (0, "loss") else None
        found.append(_link(pair, replay, plain, dtype, excused))
    return found


def _link(pair: Pair, replay: Record, plain: Record, dtype: torch.dtype, honest: HonestRuns | None) -> Finding:
    """Measures a link: a gradient relative to the largest of all, because a small one may be rounding alone, and an
    update relative to the parameter's move, to the last place of its values."""
    where, ours, theirs = pair.where, pair.ours, pair.theirs
    if ours is None or theirs is None:
        return finding(pair, BITWISE)
    allowed, beside = rounding(dtype), scale_of(theirs)
    if where.phase in ("clip", "update"):  # made from the replay's own sums, in their dtype
        allowed = max(rounding(ours.dtype), rounding(theirs.dtype))
    if where.phase in ("sum", "clip"):
        step = plain.steps[where.step]
        beside = max(
            beside, SMALL * max(map(scale_of, (step.summed if where.phase == "sum" else step.clipped).values()))
        )
    if where.phase == "update" and (moved := gap_of(theirs, replay.before(where.step, where.name))):
        allowed, beside = allowed + last_bits(ours.dtype, beside) / 4 / moved, moved
    spread = honest.spread(where) if honest else 0.0
    at = allowed, beside, None, spread, where.step, where.name
    return find(KINDS[where.phase], label_of(pair), ours, theirs, *at)


def finding(pair: Pair, asked: Measures, honest: HonestRuns | None = None, *, first: int = 0) -> Finding:
    """Measures a pair."""
    where, kind, label = pair.where, KINDS[pair.where.phase], label_of(pair)
    if pair.ours is None or pair.theirs is None:
        label += " is missing" if pair.ours is None else " (none expected)"
        return incomparable(kind, label, where.step, where.name)
    length = asked.length if where.phase == "publish" else None
    spread, measure = honest.spread(where) if honest else 0.0, "relative" if length is None else "steps"
    at = asked.of(where, first), length, pair.whole, spread, where.step, where.name, measure
    return find(kind, label, pair.ours, pair.theirs, *at)


def label_of(pair: Pair) -> str:
    """The tensor's name in a finding."""
    where, (name, start, stop) = pair.where, pair.piece or (pair.where.name, 0, 0)
    tensor = f"{where.key} of {name}" if where.key else name
    parts = [f"{tensor}[{start}:{stop}]" if pair.piece else tensor] if tensor else []
    parts += [f"step {where.step + 1}"] if where.phase not in ("publish", "state") else []
    parts += [f"microbatch {where.microbatch}"] if where.microbatch is not None else []
    parts += [f"rank {pair.rank}"] if pair.rank >= 0 else []
    return ", ".join(parts)
