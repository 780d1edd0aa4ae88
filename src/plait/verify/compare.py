"""Comparing two runs: what is measured, and what counts as equal.

Errors are max|a - b| and max|a - b| / max|b|, tensor by tensor.  *Bitwise* means that every element is the same number.

Two comparisons are made.  Against the single process that replays the layout's own tree of additions, everything must
be bitwise; a layout with a tensor axis splits matrix products, whose sums no replay can order, so the tolerances below
apply.  Against one plain full-batch step the additions differ, so the first step's losses, gradients and norm must
agree within rounding.  Parameters after k steps are compared relative to lr * k, the distance that the optimizer can
have moved them, because Adam turns the rounding noise of a gradient that should be zero into a full step.  Plain SGD
does not amplify: its parameters must agree within rounding too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.core.tensor_cut import TensorCut
from plait.tensor_parallel.pieces import piece_of
from plait.verify.record import RankRecord
from plait.verify.reference import Piece, Record

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative tolerance where only the order of additions differs, by dtype."""


STEPS_APART = {torch.float32: 0.05, torch.float64: 0.05, torch.bfloat16: 2.0, torch.float16: 2.0}
"""How far parameters may be apart after k steps of Adam, as a share of lr * k, the distance they can have moved."""

DRIFT = {torch.float32: 1e-2, torch.float64: 1e-8, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Relative tolerance of later losses and norms, and of optimizer state, once rounding has become different steps."""


@dataclass(frozen=True)
class Measures:
    """The tolerances of a comparison; all 0 requires the same bits.

    ``rounding`` bounds the first step's losses, gradients and norm, ``drift`` later losses and norms and the
    optimizer's state, both relative to the tensor.  Parameters may differ by ``steps`` of ``length``, the distance that
    an optimizer which amplifies rounding can have moved them, or by ``drift`` where ``length`` is None.
    """

    rounding: float = 0.0
    drift: float = 0.0
    steps: float = 0.0
    length: float | None = None

    @classmethod
    def split_products(cls, dtype: torch.dtype, lr: float, steps: int, *, amplifies: bool) -> Measures:
        """For layouts that split matrix products."""
        if amplifies:
            return cls(ROUNDING[dtype], DRIFT[dtype], STEPS_APART[dtype], lr * steps)
        return cls(ROUNDING[dtype], 10 * ROUNDING[dtype])


BITWISE = Measures()


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

    @property
    def equal(self) -> bool:
        return self.bitwise or (self.tolerance > 0 and self.measured <= self.tolerance)


def find(
    kind: str,
    name: str,
    ours: Tensor,
    theirs: Tensor,
    tolerance: float = 0.0,
    step_length: float | None = None,
    whole: Tensor | None = None,
) -> Finding:
    """Compare two tensors of one shape.

    Args:
        tolerance: 0 requires equality; otherwise it bounds the measure.
        step_length: lr * k, to measure the difference relative to the distance moved instead of the tensor.
        whole: the tensor of which ``theirs`` is a piece: its scale, not the piece's, is what rounding is relative to.
    """
    a, b = ours.detach().double().reshape(-1), theirs.detach().double().reshape(-1)
    if a.shape != b.shape:
        return Finding(kind, name, float("inf"), float("inf"), False, tolerance, measured=float("inf"))
    same = torch.equal(ours.reshape(-1), theirs.reshape(-1))
    gap = (a - b).abs().max().item() if len(a) else 0.0
    scaling = b if whole is None else whole.detach().double()
    scale = scaling.abs().max().item() if scaling.numel() else 0.0
    if gap != gap:
        gap = float("inf")
    relative = gap / scale if scale else (0.0 if gap == 0 else float("inf"))
    measured = relative if step_length is None else gap / step_length
    return Finding(kind, name, gap, relative, same, tolerance, "relative" if step_length is None else "steps", measured)


def number(kind: str, name: str, ours: float | None, theirs: float | None, tolerance: float = 0.0) -> Finding:
    """Compare two numbers."""
    if ours is None or theirs is None:
        return Finding(kind, name, 0.0, 0.0, ours is theirs, tolerance)
    return find(
        kind,
        name,
        torch.tensor([ours], dtype=torch.float64),
        torch.tensor([theirs], dtype=torch.float64),
        tolerance,
    )


def part_held(record: RankRecord, name: str, whole: Tensor, start: int, stop: int) -> Tensor:
    """A run that a rank recorded, taken from the whole tensor."""
    if name in record.cuts:
        whole = piece_of(whole.view(record.cuts[name][0]), TensorCut(*record.cuts[name]), record.tensor_rank)
    return whole.reshape(-1)[start:stop]


def against_tree(ranks: Sequence[RankRecord], reference: Record, asked: Measures = BITWISE) -> list[Finding]:
    """Every rank's record against the replay of the layout's own tree: all of it bitwise, or within ``asked``."""
    found: list[Finding] = []
    for record in ranks:
        at = f"rank {record.rank}"
        bounds = [asked.rounding, *[asked.drift] * len(reference.losses)]
        for step, loss in enumerate(record.losses[: len(reference.losses)]):
            found.append(number("loss", f"step {step + 1}, {at}", loss, reference.losses[step], bounds[step]))
            first = record.data_rank * len(record.local_losses[step])
            for m, local in enumerate(record.local_losses[step]):
                single = reference.microbatch_losses[step][first + m]
                found.append(
                    number("loss", f"step {step + 1}, microbatch {first + m}, {at}", local, single, bounds[step])
                )
            norms = record.norms[step], reference.norms[step]
            found.append(number("norm", f"step {step + 1}, {at}", *norms, bounds[step]))
        for step, pieces in enumerate(record.gradients):
            for (name, start, stop), piece in pieces.items():
                gradient = reference.gradients[step].get(name)
                label = f"{name}[{start}:{stop}], step {step + 1}, {at}"
                if gradient is None:
                    found.append(
                        Finding("gradient", label + " (none expected)", float("inf"), float("inf"), False, 0.0)
                    )
                elif step == 0 or asked == BITWISE:  # later gradients belong to parameters that differ
                    held = part_held(record, name, gradient, start, stop)
                    found.append(find("gradient", label, piece, held, asked.rounding, whole=gradient))
        for name, value in record.parameters.items():
            whole = reference.parameters.get(name, reference.buffers.get(name))
            if whole is not None:
                bound = asked.drift if asked.length is None else asked.steps
                found.append(find("parameter", f"{name}, {at}", value, whole, bound, asked.length))
        for (name, start, stop), state in record.state.items():
            for key, value in state.items():
                theirs = reference.state[name].get(key, torch.empty(0)).reshape(-1)
                each = len(theirs) == reference.parameters[name].numel()
                part = part_held(record, name, theirs, start, stop) if each else theirs
                label = f"{key} of {name}[{start}:{stop}], {at}"
                found.append(find("optimizer", label, value, part, asked.drift, whole=theirs))
    found += _coverage(ranks, reference)
    return found


def missing(kind: str, what: str) -> Finding:
    """Something that should have been compared but is missing."""
    return Finding(kind, f"{what} is missing", math.inf, math.inf, False, 0.0, measured=math.inf)


def _coverage(ranks: Sequence[RankRecord], reference: Record) -> list[Finding]:
    """Nothing may be missing: together the ranks have recorded all that the reference has."""
    steps = len(reference.losses)
    found = []
    for record in ranks:
        at = f"rank {record.rank}"
        if not len(record.losses) == len(record.local_losses) == len(record.norms) == steps:
            found.append(missing("loss", f"a step of {at}"))
        names = {*reference.parameters, *reference.buffers}
        found += [missing("parameter", f"{n} of {at}") for n in sorted(names - record.parameters.keys())]
        if reference.gradients and len(record.gradients) != steps:
            found.append(missing("gradient", f"a step of {at}"))
    for step in range(steps):
        told = {r.data_rank: r.local_losses[step] for r in ranks if step < len(r.local_losses)}
        if sum(map(len, told.values())) != len(reference.microbatch_losses[step]):
            found.append(missing("loss", f"a microbatch of step {step + 1}"))
    for step, gradients in enumerate(reference.gradients):
        here = [(r, piece) for r in ranks if step < len(r.gradients) for piece in r.gradients[step]]
        found += [
            missing("gradient", f"part of {name} in step {step + 1}")
            for name, gradient in gradients.items()
            if not _covers(here, name, gradient.numel())
        ]
    for name, state in reference.state.items():
        for key in state:
            here = [(r, piece) for r in ranks for piece, values in r.state.items() if key in values]
            if not _covers(here, name, reference.parameters[name].numel()):
                found.append(missing("optimizer", f"part of {key} of {name}"))
    return found


def _covers(runs: Iterable[tuple[RankRecord, Piece]], name: str, numel: int) -> bool:
    """Whether the runs of a parameter cover every element: of the whole, or of any tensor rank's piece."""
    mine = [(record, piece) for record, piece in runs if piece[0] == name]
    cut = next((TensorCut(*record.cuts[name]) for record, _ in mine if name in record.cuts), None)
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
    ranks: Sequence[RankRecord], plain: Record, dtype: torch.dtype, lr: float, steps: int, *, amplifies: bool
) -> list[Finding]:
    """The run against one plain full-batch step, within the tolerances above.

    In fp16 one of them may have skipped another step (its scaled gradients were not finite): then only the first loss
    can be compared.

    Args:
        lr: the largest learning rate.
        amplifies: whether the optimizer normalises gradients (Adam), so that rounding noise becomes steps.
    """
    first, bounds = ranks[0], [ROUNDING[dtype], *[DRIFT[dtype]] * (steps - 1)]
    left_out = dtype == torch.float16 and [bool(g) for g in plain.gradients] != first.made
    found = []
    for step, bound in enumerate(bounds[: 1 if left_out else steps]):
        found.append(number("loss", f"step {step + 1}", first.losses[step], plain.losses[step], bound))
        if not left_out:
            found.append(number("norm", f"step {step + 1}", first.norms[step], plain.norms[step], bound))
    if left_out:
        return found
    for record in ranks:
        for (name, start, stop), piece in (record.gradients or [{}])[0].items():
            whole = plain.gradients[0][name]
            held = part_held(record, name, whole, start, stop)
            label = f"{name}[{start}:{stop}], step 1, rank {record.rank}"
            found.append(find("gradient", label, piece, held, bounds[0], whole=whole))
    for name, value in first.parameters.items():
        if name not in plain.parameters:
            continue
        if amplifies:
            found.append(
                find("parameter", name, value, plain.parameters[name], STEPS_APART[dtype], step_length=lr * steps)
            )
        else:
            found.append(find("parameter", name, value, plain.parameters[name], bounds[0]))
    return found


@dataclass(frozen=True)
class Summary:
    """The findings of one kind in a line: the worst of each measure, and the tensor that is worst."""

    kind: str
    count: int
    max_abs: float
    max_rel: float
    bitwise: bool
    tolerance: float
    measure: str
    measured: float
    equal: bool
    worst: str


def summarise(findings: Iterable[Finding]) -> list[Summary]:
    """One line per kind, in the order in which kinds first appear."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.kind, []).append(finding)
    lines = []
    for kind, group in groups.items():
        worst = max(group, key=lambda f: (not f.equal, not f.bitwise, f.measured))
        lines.append(
            Summary(
                kind,
                len(group),
                max(f.max_abs for f in group),
                max(f.max_rel for f in group),
                all(f.bitwise for f in group),
                worst.tolerance,
                worst.measure,
                max(f.measured for f in group),
                all(f.equal for f in group),
                worst.name,
            )
        )
    return lines
