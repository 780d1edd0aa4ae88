"""Compares the optimizer's updates with those that the job's optimizer makes from the same gradients.

The update is recomputed from the witnessed gradient, so that the optimizer is not blamed for a wrong gradient, and from
the witnessed parameters, so that no difference adds up over steps.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.referee.difference import describe, factor_text, fitted
from plait.referee.values import gap as apart
from plait.referee.values import gaps, largest, last_bits, scale_of, tolerance, wide
from plait.referee.witness.judgement import Judgement, Phase, accuse, ranks_text
from plait.referee.witness.record import options_of
from plait.referee.witness.stored import RankStep, Witnessed
from plait.referee.wrong import cause_of_update
from plait.table.region import overlap

ALIKE = 1e-6
"""Options this near to each other count as the same."""
MATHEMATICS = (
    *("lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "nesterov", "maximize", "amsgrad"),
    *("centered", "momentum_decay", "decoupled_weight_decay", "lr_decay", "rho", "lambd", "t0", "etas"),
    *("step_sizes", "ns_steps"),
)
"""Options that change the numbers; the others choose a kernel."""


def judge_options(
    number: int, witnessed: Witnessed, steps: Sequence[RankStep], names: Mapping[int, str], optimizer: Optimizer
) -> Judgement | None:
    """Reports the first parameter whose optimizer options differ from the job's; ``names`` is by the parameter's id."""
    due = {names[id(p)]: options_of(group) for group in optimizer.param_groups for p in group["params"]}
    for run, step in zip(witnessed.runs, steps, strict=True):
        for piece in run.pieces:
            if piece.name not in due:
                continue
            if piece.group is None:
                ranks = tuple(r.rank for r in witnessed.runs if any(p == piece for p in r.pieces))
                cause = "no optimizer has it: it was left out, or made after the optimizer"
                what = f"{piece.name} is in no optimizer on {ranks_text(ranks, len(witnessed.runs))}"
                return accuse(number, "options", what, cause, ranks, name=piece.name, where="optimizer", factor=0.0)
            if piece.group[0] not in step.about["stepped"]:
                continue
            given = step.about["options"][piece.group[0]][piece.group[1]]
            for key in MATHEMATICS:
                if key not in given or key not in due[piece.name] or _near(given[key], due[piece.name][key]):
                    continue
                one, other = given[key], due[piece.name][key]
                factor = one / other if isinstance(one, float) and isinstance(other, float) and other else None
                cause = "another optimizer, or another schedule, than the job's"
                what = f"rank {run.rank}: {key} is {_number(one)} and the job's is {_number(other)}"
                where, name = f"optimizer of {piece.name}", piece.name
                return accuse(number, "options", what, cause, (run.rank,), name=name, where=where, factor=factor)
    return None


def judge_update(
    number: int,
    witnessed: Witnessed,
    steps: Sequence[RankStep],
    before: Sequence[Mapping[str, Tensor]],
    due: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
) -> tuple[Judgement | None, float]:
    """The fault of an update, and the largest difference that is no fault.

    Args:
        before: each rank's pieces before the update.
        due: the right whole parameters after it.
        start: the whole parameters before it.
    """
    found: dict[tuple[int, str], tuple[float | None, str]] = {}
    worst, most, clean = 0.0, 0.0, 0
    for run, step, old in zip(witnessed.runs, steps, before, strict=True):
        new = step.of("after")
        for name in (name for name in run.regions if name in due):
            piece, size = wide(run.part(name, due[name])), scale_of(due[name])
            made, right = wide(new[name]) - wide(old[name]), piece - wide(run.part(name, start[name]))
            bits = last_bits(new[name].dtype, 1.0) * torch.maximum(wide(old[name]).abs(), piece.abs())
            gap = largest((gaps(made, right) - bits.nan_to_num(0.0, 0.0)).clamp(min=0.0))
            allowed = tolerance(new[name].dtype, scale_of(wide(due[name]) - wide(start[name])))
            if gap <= allowed:
                most = max(most, gap / max(size, 1e-300))
                clean += bool(right.numel())
                continue
            worst = max(worst, gap / max(scale_of(right), 1e-300))
            factor = _factor_within(made, right, allowed + scale_of(bits))
            what = f"is {factor_text(round(factor, 3))} times" if factor is not None else ""
            found[run.rank, name] = factor, what or f"differs, {describe(made, right, allowed).text}"
    if not found:
        return None, most
    (_, name), (factor, amount) = next(iter(found.items()))
    ranks = tuple(dict.fromkeys(rank for rank, _ in found))
    factors = [x for x, _ in found.values()]
    if any(x is None or factor is None or abs(x - factor) > 1e-2 * max(1.0, abs(factor)) for x in factors):
        factor = None
    apart = "; its ranks drift apart" if len(ranks) < len(witnessed.runs) else ""
    every = not clean or all((rank, n) in found for rank in ranks for n in witnessed.runs[rank].regions if n in due)
    what = "of every parameter" if factor is not None and every else f"of {name}"
    cause = cause_of_update(factor, every=every)
    amount = "was not made" if factor is not None and abs(factor) < 1e-2 else amount
    judged, text, of = "" if factor is not None and every else name, f"it {amount}{apart}", len(witnessed.runs)
    where = f"update {what}"
    return accuse(
        number, "update", text, cause, ranks, of, name=judged, where=where, factor=factor, residual=worst
    ), most


def judge_between(
    number: int,
    witnessed: Witnessed,
    left: Sequence[Mapping[str, Tensor]],
    found: Sequence[Mapping[str, Tensor]],
    last: Sequence[Mapping[str, Tensor]] | None,
) -> Judgement | None:
    """Reports parameters that changed between the update of a step and the next forward.

    Args:
        left: each rank's pieces after the update of step ``number``.
        found: the changed pieces, as the next forward found them.
        last: each rank's pieces before that update.
    """
    for run, old, new in zip(witnessed.runs, left, found, strict=True):
        for name in (name for name in run.regions if name in new):  # a file has its tensors in any order
            value = new[name]
            gap = apart(value, old[name])
            if gap <= last_bits(value.dtype, scale_of(old[name])):
                continue
            ranks = tuple(r.rank for r, pieces in zip(witnessed.runs, found, strict=True) if name in pieces)
            factor, cause = None, "something besides the optimizer writes parameters"
            if last is not None:
                update, slack = wide(old[name]) - wide(last[run.rank][name]), last_bits(value.dtype, scale_of(value))
                again = _factor_within(wide(value) - wide(old[name]), update, slack)
                if again is not None and again > 0:
                    factor = 1 + again
                    cause = f"the update was applied {'twice' if abs(factor - 2) < 2e-2 else f'{factor:.3g} times'}"
            phase: Phase = "update" if factor else "between"
            what, where = f"it changed by up to {gap:.3g} after the optimizer's step", f"update of {name}"
            of = len(witnessed.runs)
            return accuse(number, phase, what, cause, ranks, of, name=name, where=where, factor=factor, residual=gap)
    return None


def judge_replicas(
    witnessed: Witnessed, pieces: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]
) -> Judgement | None:
    """Compares an initial parameter that several ranks hold whole; the first rank's copy counts in the ``whole``."""
    for run, own in zip(witnessed.runs, pieces, strict=True):
        for name, value in own.items():
            gap, here = apart(value, run.part(name, whole[name])), run.regions[name]
            if gap > last_bits(value.dtype, scale_of(value)):
                holders = (r for r in witnessed.runs if name in r.regions)
                other = next(r.rank for r in holders if overlap(r.regions[name], here) is not None)
                cause = "each rank made its own weights: seed them the same way, or send rank 0's"
                ranks, where = (other, run.rank), "initial parameters"
                what = f"{name} differs by up to {gap:.3g} between ranks {other} and {run.rank}"
                return accuse(0, "initial", what, cause, ranks, name=name, where=where, residual=gap)
    return None


def _factor_within(one: Tensor, other: Tensor, slack: float) -> float | None:
    """The c of one = c * other; None if an element is off by more than ``slack``."""
    factor, rest = fitted(one, other)
    return factor if other.any() and largest(rest) <= slack * max(1.0, abs(factor)) else None


def _near(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= ALIKE * max(abs(one), abs(other))
    return one == other


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
