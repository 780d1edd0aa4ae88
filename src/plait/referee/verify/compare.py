"""Comparing two runs: what is measured, and what counts as equal.

Errors are max|a - b| and max|a - b| / max|b|, tensor by tensor.  *Bitwise* means that every element is the same number.

Two comparisons are made.  Against the single process that replays the layout's own tree of additions, everything must
be bitwise; a layout with a tensor axis splits matrix products, whose sums no replay can order, so tolerances apply.
Against plain full-batch steps the additions differ, so the first step's loss, gradients and norm must agree within
rounding.  Parameters after k steps are compared relative to lr * k, the distance that the optimizer can have moved
them, because Adam turns the rounding noise of a gradient that should be zero into a full step.  Plain SGD does not
amplify: its parameters must agree within rounding too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait.referee.values import gap as gap_of
from plait.referee.values import scale_of
from plait.referee.verify.honest import MARGIN, HonestRuns
from plait.referee.verify.record import RankRecord
from plait.referee.verify.reference import Piece, Record
from plait.run.config import RunConfig
from plait.table.tensor_cut import TensorCut
from plait.tensor.pieces import piece_of

TOLERANCES = {
    torch.float32: (1e-5, 1e-2, 0.05),
    torch.float64: (1e-12, 1e-8, 0.05),
    torch.bfloat16: (5e-2, 0.3, 2.0),
    torch.float16: (1e-2, 0.3, 2.0),
}
"""``rounding``, ``drift`` and ``parameter`` (see ``Measures``) for an optimizer that amplifies rounding."""


@dataclass(frozen=True)
class Measures:
    """The tolerances of a comparison; all 0 requires the same bits.

    ``rounding`` bounds the first step's losses, gradients and norm, where only the order of additions differs;
    ``drift`` bounds later losses and norms and the optimizer's state, once rounding has become different steps.  Both
    are relative to the tensor.  ``parameter`` bounds the parameters, relative to ``length`` = lr * k, or to the tensor
    where that is None.
    """

    rounding: float = 0.0
    drift: float = 0.0
    parameter: float = 0.0
    length: float | None = None

    @classmethod
    def full_batch(cls, dtype: torch.dtype, lr: float, steps: int, *, amplifies: bool) -> Measures:
        """Against plain full-batch steps; an optimizer ``amplifies`` rounding if it normalises gradients (Adam)."""
        rounding, drift, apart = TOLERANCES[dtype]
        return cls(rounding, drift, apart, lr * steps) if amplifies else cls(rounding, drift, rounding)

    def of_split_products(self) -> Measures:
        """Against the replay, where a layout splits products."""
        if self.length is not None:
            return self
        return Measures(self.rounding, 10 * self.rounding, 10 * self.rounding)


BITWISE = Measures()


def asked(config: RunConfig, *, one_layout: bool = True) -> Measures:
    """What the replay is held to: the same bits, unless the mesh has a tensor axis, or the run began in another layout
    and was resumed in this one."""
    return BITWISE if config.parsed_mesh.tensor == 1 and one_layout else full_batch(config).of_split_products()


def full_batch(config: RunConfig) -> Measures:
    """What plain full-batch steps are held to."""
    amplifies = config.optimizer_row.amplifies
    return Measures.full_batch(config.torch_dtype, config.lr, config.steps, amplifies=amplifies)


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
    """Of honest runs, where the tolerance did not hold: the difference may be ``MARGIN`` times that."""

    @property
    def equal(self) -> bool:
        within = self.tolerance > 0 and self.measured <= self.tolerance
        honest = 0 < self.spread < math.inf and self.max_abs <= MARGIN * self.spread
        return self.bitwise or within or honest

    @property
    def excused(self) -> bool:
        """Whether it is equal because honest runs differ as much, and not by its tolerance."""
        return self.equal and not self.bitwise and self.measured > self.tolerance

    @property
    def asked(self) -> str:
        """What is required of it, in words."""
        unit = "" if self.measure == "relative" else " lr*k"
        if self.excused:
            return f"{MARGIN:g} spreads"
        return "bitwise" if self.tolerance == 0 else f"{self.tolerance:.0e}{unit}"


def find(
    kind: str, name: str, ours: Tensor, theirs: Tensor, tolerance: float = 0.0, step_length: float | None = None,
    whole: Tensor | None = None, spread: float = 0.0,
) -> Finding:  # fmt: skip
    """Compare two tensors of one shape.

    The difference is relative to ``step_length``, which is lr * k; without one to the largest element of ``whole``, of
    which ``theirs`` is a piece.
    """
    if ours.numel() != theirs.numel():
        return incomparable(kind, name)
    gap, scale = gap_of(ours, theirs), scale_of(theirs if whole is None else whole)
    same = ours.dtype == theirs.dtype and gap == 0
    relative = gap / scale if scale else (0.0 if gap == 0 else math.inf)
    measure, measured = ("relative", relative) if step_length is None else ("steps", gap / step_length)
    return Finding(kind, name, gap, relative, same, tolerance, measure, measured, spread)


def number(
    kind: str, name: str, ours: float | None, theirs: float | None, tolerance: float = 0.0, spread: float = 0.0
) -> Finding:
    """Compare two numbers; None is equal to None alone."""
    if ours is None or theirs is None:
        return Finding(kind, name, 0.0, 0.0, True, tolerance) if ours is theirs else incomparable(kind, name)
    a, b = (torch.tensor([value], dtype=torch.float64) for value in (ours, theirs))
    return find(kind, name, a, b, tolerance, spread=spread)


def incomparable(kind: str, name: str) -> Finding:
    """What has no counterpart, or one of another shape, is never equal."""
    return Finding(kind, name, math.inf, math.inf, False, 0.0, measured=math.inf)


class PlacedOnTensorAxis(Protocol):
    """What knows how parameters are cut over the tensor axis, and which pieces are a rank's."""

    tensor_rank: int

    def cut(self, name: str) -> TensorCut | None: ...


def same_run(record: PlacedOnTensorAxis, whole: Tensor, piece: Piece) -> Tensor:
    """The elements of a whole tensor that a rank recorded as this piece."""
    name, start, stop = piece
    if cut := record.cut(name):
        whole = piece_of(whole.view(cut.shape), cut, record.tensor_rank)
    return whole.reshape(-1)[start:stop]


def against_tree(
    ranks: Sequence[RankRecord], reference: Record, asked: Measures = BITWISE, honest: HonestRuns | None = None
) -> list[Finding]:
    """Every rank's record against the replay of the layout's own tree: all of it bitwise, or within ``asked``, but for
    what ``honest`` runs excuse: gradients, the parameters and states that they have made."""
    compared = [finding for record in ranks for finding in _against_tree(record, reference, asked, honest)]
    return [*compared, *_missing(ranks, reference)]


def _against_tree(
    record: RankRecord, reference: Record, asked: Measures, honest: HonestRuns | None
) -> Iterator[Finding]:
    at = f"rank {record.rank}"
    for step, (loss, single) in enumerate(zip(record.losses, reference.losses, strict=False)):
        now, bound = f"step {reference.first + step + 1}", asked.drift if step else asked.rounding
        yield number("loss", f"{now}, {at}", loss, single, bound)
        first = record.data_rank * len(record.local_losses[step])
        for m, local in enumerate(record.local_losses[step], first):
            yield number("loss", f"{now}, microbatch {m}, {at}", local, reference.microbatch_losses[step][m], bound)
        yield number("norm", f"{now}, {at}", record.norms[step], reference.norms[step], bound)
    for step, pieces in enumerate(record.gradients):
        for piece, ours in pieces.items():
            gradient = reference.gradients[step].get(piece[0])
            label = label_of(piece, step, record.rank)
            if gradient is None:
                yield incomparable("gradient", f"{label} (none expected)")
            elif step == 0 or asked == BITWISE:  # later gradients belong to parameters that differ
                spread, right = honest.gradient(step, piece[0]) if honest else 0.0, same_run(record, gradient, piece)
                yield find("gradient", label, ours, right, asked.rounding, whole=gradient, spread=spread)
    for name, value in record.parameters.items():
        whole = reference.parameters.get(name, reference.buffers.get(name))
        if whole is not None:
            spread = honest.parameter(name) if honest and name in reference.parameters else 0.0
            yield find("parameter", f"{name}, {at}", value, whole, asked.parameter, asked.length, spread=spread)
    for piece, state in record.state.items():
        for key, value in state.items():
            whole = reference.state[piece[0]].get(key, torch.empty(0)).reshape(-1)
            by_element = len(whole) == reference.parameters[piece[0]].numel()
            theirs = same_run(record, whole, piece) if by_element else whole
            label, spread = f"{key} of {_label(piece)}, {at}", honest.state(piece[0], key) if honest else 0.0
            yield find("optimizer", label, value, theirs, asked.drift, whole=whole, spread=spread)


def label_of(piece: Piece, step: int, rank: int) -> str:
    """How a finding calls a rank's piece of a gradient."""
    return f"{_label(piece)}, step {step + 1}, rank {rank}"


def name_of(finding: Finding) -> str:
    """The parameter of a finding of a gradient."""
    return finding.name.rpartition("[")[0]


def _label(piece: Piece) -> str:
    name, start, stop = piece
    return f"{name}[{start}:{stop}]"


def _missing(ranks: Sequence[RankRecord], reference: Record) -> Iterator[Finding]:
    """What the reference has and the ranks together have not recorded."""

    def missing(kind: str, what: str) -> Finding:
        return incomparable(kind, f"{what} is missing")

    steps = len(reference.losses)
    for record in ranks:
        at = f"rank {record.rank}"
        if not len(record.losses) == len(record.local_losses) == len(record.norms) == steps:
            yield missing("loss", f"a step of {at}")
        for name in sorted({*reference.parameters, *reference.buffers} - record.parameters.keys()):
            yield missing("parameter", f"{name} of {at}")
        if reference.gradients and len(record.gradients) != steps:
            yield missing("gradient", f"a step of {at}")
    for step, losses in enumerate(reference.microbatch_losses):
        recorded = {r.data_rank: len(r.local_losses[step]) for r in ranks if step < len(r.local_losses)}
        if sum(recorded.values()) != len(losses):
            yield missing("loss", f"a microbatch of step {step + 1}")
    for step, gradients in enumerate(reference.gradients):
        runs = [(r, piece) for r in ranks if step < len(r.gradients) for piece in r.gradients[step]]
        for name, gradient in gradients.items():
            if not _cover(runs, name, gradient.numel()):
                yield missing("gradient", f"part of {name} in step {step + 1}")
    for name, state in reference.state.items():
        for key in state:
            runs = [(r, piece) for r in ranks for piece, values in r.state.items() if key in values]
            if not _cover(runs, name, reference.parameters[name].numel()):
                yield missing("optimizer", f"part of {key} of {name}")


def _cover(runs: Iterable[tuple[RankRecord, Piece]], name: str, numel: int) -> bool:
    """Whether the runs of a parameter cover every element: of the whole, or of each tensor rank's piece."""
    mine = [(record, piece) for record, piece in runs if piece[0] == name]
    cut = next((cut for record, _ in mine if (cut := record.cut(name))), None)
    lengths = {None: numel} if cut is None else {i: math.prod(cut.local_shape(i)) for i in range(cut.ways)}
    for index, length in lengths.items():
        end = 0
        for _, start, stop in sorted(piece for record, piece in mine if index in (None, record.tensor_rank)):
            if start > end:
                return False
            end = max(end, stop)
        if end < length:
            return False
    return True


def against_plain(
    ranks: Sequence[RankRecord], plain: Record, within: Measures, *, may_skip: bool, honest: HonestRuns | None = None
) -> Iterator[Finding]:
    """The run against plain full-batch steps; ``honest`` runs excuse what is a tolerance off, but not the first loss.

    ``may_skip``: in fp16 either may have skipped a step that the other made, because its scaled gradients were not
    finite; then only the first loss can be compared.
    """
    first = ranks[0]
    apart = may_skip and [bool(gradients) for gradients in plain.gradients] != first.made
    numbers = zip(first.losses, plain.losses, first.norms, plain.norms, strict=False)
    for step, (loss, plain_loss, norm, plain_norm) in enumerate(numbers):
        bound = within.drift if step else within.rounding
        yield number("loss", f"step {step + 1}", loss, plain_loss, bound, honest.loss(step) if honest and step else 0.0)
        if apart:
            return
        spread = honest.norm(step) if honest and norm is not None else 0.0
        yield number("norm", f"step {step + 1}", norm, plain_norm, bound, spread)
    for record in ranks:
        for piece, ours in record.gradients[0].items() if record.gradients else ():
            whole, label = plain.gradients[0][piece[0]], label_of(piece, 0, record.rank)
            spread = honest.gradient(0, piece[0]) if honest else 0.0
            right = same_run(record, whole, piece)
            yield find("gradient", label, ours, right, within.rounding, whole=whole, spread=spread)
    for name, value in first.parameters.items():
        if name in plain.parameters:
            spread, right = honest.parameter(name) if honest else 0.0, plain.parameters[name]
            yield find("parameter", name, value, right, within.parameter, within.length, spread=spread)
