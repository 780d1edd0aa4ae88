"""Compares the optimizer's gradients with the true mean gradient, and names the fault of a sum.

    every parameter on every rank times 4      a division that is left out
    only the rank's own samples                no all-reduce
    only the last forward of each rank         gradients overwritten
    each forward the same weight               a mean of means
    this step's and the previous one's         zero_grad left out

A fault that no sum explains is reported parameter by parameter, in the order of the backward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from plait.referee.contributions import NEAR, add, contributions, explain
from plait.referee.difference import Discrepancy, describe, factor_text
from plait.referee.values import finite, largest, tolerance, wide
from plait.referee.values import gap as apart
from plait.referee.witness.drift import Slack
from plait.referee.witness.inputs import ForwardCall
from plait.referee.witness.judgement import Judgement, accuse
from plait.referee.witness.replay import Gradients, SampleGradient, clipped
from plait.referee.witness.some_ranks import holders, made_of_others, norms_of_some
from plait.referee.witness.stored import RankRun, RankStep, Witnessed

Parts: TypeAlias = Sequence[tuple[ForwardCall, SampleGradient]]
"""The true gradient of each forward."""

EXPLAINED = 1e-3
"""The largest rest of a gradient that a sum explains."""


@dataclass(frozen=True)
class Setting:
    """A step's true gradient, and the known facts about its computation."""

    step: int
    witnessed: Witnessed
    true: Gradients
    """After the clip."""
    clip: float | None
    norm: float
    """Before the clip."""
    scaled: float
    """The factor of the clip."""
    count: int
    samples: int
    slack: Slack = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.witnessed.runs)


@dataclass(frozen=True)
class Seen:
    """One rank's gradients and the true ones, by parameter."""

    run: RankRun
    observed: dict[str, Tensor]
    true: dict[str, Tensor]
    wrong: dict[str, float]
    """|observed - true| relative to the largest element of the whole tensor, if it is too large."""

    @property
    def rank(self) -> int:
        return self.run.rank

    def flat(self, which: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([which[name].reshape(-1) for name in self.true])


def compare(setting: Setting, steps: Sequence[RankStep]) -> tuple[list[Seen], float]:
    """Compares each rank's gradients with the true ones; also returns the largest difference that is within bounds."""
    found, most = [], 0.0
    overall = max(map(largest, setting.true.values()), default=0.0)
    for run, step in zip(setting.witnessed.runs, steps, strict=True):
        given, wrong = step.of("gradient"), {}
        right = {n: run.part(n, setting.true[n]) for n in run.regions if n in setting.true}
        observed = {name: given.get(name, torch.zeros_like(piece)) for name, piece in right.items()}
        for name, piece in right.items():
            size = largest(setting.true[name])
            gap = apart(observed[name], piece)
            relative = gap / max(size, 1e-300)
            allowed = max(tolerance(piece.dtype, size, overall), setting.slack.get(name, 0.0))
            if not gap <= allowed:
                wrong[name] = relative
            elif size > 0.1 * overall:
                most = max(most, relative)
        found.append(Seen(run, observed, right, wrong))
    return found, most


def judge_gradient(
    setting: Setting, seen: Sequence[Seen], parts: Parts, previous: Gradients | None
) -> Judgement | None:
    """The fault of a step's gradients; None if all are right.

    Args:
        parts: the true gradient of each forward, clipped as the whole is.
        previous: the observed gradient of the previous step.
    """
    faulty = [one for one in seen if one.wrong]
    if not faulty:
        return None
    ranks = tuple(one.rank for one in faulty)
    worst = max(gap for one in faulty for gap in one.wrong.values())

    def judgement(factor: float | None, cause: str, what: str) -> Judgement:
        return accuse(setting.step, "gradient", what, cause, ranks, setting.ranks, factor=factor, residual=worst)

    whole = [describe(one.flat(one.observed), one.flat(one.true)) for one in faulty]
    if all(shape.pattern in ("factor", "nothing") for shape in whole) and all(s.factor is not None for s in whole):
        factors = [shape.factor or 0.0 for shape in whole]
        if max(factors) - min(factors) <= NEAR * max(abs(f) for f in factors):
            cause = cause_of_factor(factors[0], setting, calls_of(parts))
            return judgement(factors[0], cause, f"every gradient is {factor_text(factors[0])} times what it should be")
        if cause := _clipped_alone(faulty, setting):
            return judgement(factors[0], cause, f"every gradient has a factor, {_list(ranks, factors)}")
    if (judged := _as_a_sum(setting, faulty, parts, previous)) is not None:
        return judgement(*judged)
    return replace(_by_parameter(setting, faulty), residual=worst)


def _as_a_sum(
    setting: Setting, faulty: Sequence[Seen], parts: Parts, previous: Gradients | None
) -> tuple[float | None, str, str] | None:
    """(factor, cause, what) if the gradients of forwards, and of the previous step, explain every rank's gradient."""
    groups = [group for group, _ in parts]
    told = []
    for one in faulty:
        sources = [part.gradients for _, part in parts] + ([previous] if previous else [])
        pieces = [
            [one.run.part(n, g[n]) if n in g else torch.zeros_like(one.true[n]) for n in one.true] for g in sources
        ]
        if not pieces or not finite(one.flat(one.observed)).all():
            return None
        found = contributions([one.observed[n] for n in one.true], pieces)
        if found.rest > EXPLAINED or not found.determined:
            return None
        told.append(found)
    c, rank = told[0].coefficients[: len(parts)], faulty[0].rank
    again = told[0].coefficients[len(parts)] if previous else 0.0
    names = [str(group) for group in groups]
    if abs(again) > NEAR:
        times = "" if abs(again - 1) <= NEAR else f", {factor_text(again)} times"
        what = f"it still holds the gradient of step {setting.step - 1}{times}"
        if max(map(abs, c), default=0.0) <= NEAR:
            return again, "the optimizer is given the gradient of the step before, and this step's is lost", what
        if max(c) - min(c) <= NEAR * max(c):
            return again, "zero_grad is left out", what
        text = explain(c, [part.count for _, part in parts], names)
        return again, "the gradient of the step before and a part of this step's are added", f"{what}, and {text}"
    if all(abs(x - 1) <= NEAR for f in told for x in f.coefficients[: len(parts)]):
        return None  # each forward is in it once: the fault is smaller than any that a sum explains
    present = [group for group, x in zip(groups, c, strict=True) if abs(x) > NEAR]
    rest = [x for x in c if abs(x) > NEAR]
    owners = {group.rank for group in groups}
    if len(owners) > 1 and all(_only_own(one, f.coefficients, groups) for one, f in zip(faulty, told, strict=True)):
        cause = (
            "it holds the samples of its own rank alone: the gradients are not summed over the ranks (no all-reduce)"
        )
        return rest[0], cause, f"rank {rank}'s own samples count {factor_text(rest[0])} times, all others not at all"
    last = {group.rank: group.call for group in groups}
    if present and any(last.values()) and all(group.call == last[group.rank] for group in present):
        what = f"only the last forward of each rank is in it, {factor_text(rest[0])} times"
        return rest[0], "gradients are overwritten where they have to be added up", what
    if cause := _mean_of_means(c, parts):
        return _odd(c), cause, explain(c, None, names)
    if cause := _clipped_before(c, parts):
        return _odd(c), cause, explain(c, None, names)
    text = explain(c, [part.count for _, part in parts], names)
    return (_odd(c), "samples do not count once each", text) if text else None


def _odd(c: Sequence[float]) -> float:
    return max(c, key=lambda x: abs(x - 1))


def _only_own(one: Seen, c: Sequence[float], groups: Sequence[ForwardCall]) -> bool:
    return all((abs(x) > NEAR) == (group.rank == one.rank) for x, group in zip(c, groups, strict=False))


def _mean_of_means(c: Sequence[float], parts: Parts) -> str:
    """The cause, if each forward, or each rank, has the same weight regardless of its count."""
    counts = [part.count for _, part in parts]
    if len({*counts}) > 1 and _alike([x * n for x, n in zip(c, counts, strict=True)]):
        many = len({group.call for group, _ in parts}) > 1
        where = "forwards of different counts" if many else "ranks of different counts"
        return f"the means of {where} are averaged, where sums are due that are divided once by the count of the step"
    own = _by_rank(parts, counts)
    if len({*own.values()}) > 1 and _alike([x * own[group.rank] for x, (group, _) in zip(c, parts, strict=True)]):
        return "each rank divides by its own count, where all have to divide by the count of the step"
    return ""


def _clipped_before(c: Sequence[float], parts: Parts) -> str:
    """The cause, if each rank's sum has been clipped to the same norm."""
    sums: dict[int, Gradients] = {}
    for group, part in parts:
        sums[group.rank] = add(sums.get(group.rank, {}), part.gradients)
    norms = {rank: clipped(own, None)[1] for rank, own in sums.items()}
    if len(norms) > 1 and _alike([x * norms[group.rank] for x, (group, _) in zip(c, parts, strict=True)]):
        return "each rank clips its own gradient before they are summed; the norm of the sum is what counts"
    return ""


def _clipped_alone(faulty: Sequence[Seen], setting: Setting) -> str:
    """The cause, if each rank's pieces have been clipped to one norm."""
    norms = [float(one.flat(one.observed).norm()) for one in faulty]
    if setting.clip is not None and not all(abs(n - setting.clip) <= EXPLAINED * setting.clip for n in norms):
        return ""
    return (
        "each rank clips by the norm of its own pieces; the norm of the whole is what counts" if _alike(norms) else ""
    )


def _not_added(name: str, faulty: Sequence[Seen], setting: Setting) -> bool:
    """True if the gradients of all ranks that have a whole parameter add up to the right one."""
    whole = tuple((0, size) for size in setting.true[name].shape)
    own = [one for one in faulty if one.run.regions.get(name) == whole]
    if len(own) != holders(setting.witnessed, name) or len(own) == 1:
        return False
    total = torch.stack([wide(one.observed[name]) for one in own]).sum(0)
    within = tolerance(own[0].true[name].dtype, largest(setting.true[name]))
    return largest(total - wide(own[0].true[name])) <= setting.ranks * within


def _by_parameter(setting: Setting, faulty: Sequence[Seen]) -> Judgement:
    """Reports the first wrong parameter in the order of the backward; parameters with a factor come before others."""
    common = {one.rank: _common(one) if setting.scaled < 1 else 1.0 for one in faulty}
    rows = [(one, name) for name in reversed(list(setting.true)) for one in faulty if name in one.wrong]
    slack = setting.slack
    shapes = [(one, name, _shape(one, name, common[one.rank], slack.get(name, 0.0))) for one, name in rows]
    shapes = [row for row in shapes if row[2].pattern != "equal"] or shapes
    _, name, shape = next((row for row in shapes if row[2].pattern in ("factor", "nothing", "region")), shapes[0])
    ranks = tuple(other.rank for other in faulty if name in other.wrong)
    many = len({n for other in faulty for n in other.wrong})
    others = (
        f"; {many - 1} other parameter{'s are' if many > 2 else ' is'} wrong too"
        if many > 1
        else "; all other parameters are right"
    )
    cause = "the gradient of one parameter" if many == 1 else "the gradient of some parameters"
    if (hidden := common[ranks[0]]) != 1:
        rest = len(setting.true) - len({n for _, n, _ in shapes})
        others = f"; the clip makes the {rest} others {factor_text(hidden)} times what they should be"
        others += ", unless it is these that are wrong" * (2 * rest <= len(setting.true))
    held = holders(setting.witnessed, name)
    if shape.pattern == "factor" and _clipped_apart(shape.factor or 0.0, shapes, common[ranks[0]], setting):
        cause += " is clipped by a separate norm, not by that of the whole"
    elif shape.pattern == "factor":
        cause += f": {cause_of_factor(shape.factor or 0.0, replace(setting, scaled=1.0), 1, held)}"
    elif _not_added(name, faulty, setting):
        cause += f": each rank has a part of the sum, and the parts are not added up over the {held} ranks"
    elif shape.pattern == "nothing":
        cause += " was never computed, or never sent"
    elif made := made_of_others(next(o.observed[n] for o, n, _ in shapes if n == name), name, setting.true):
        cause += f": {made}"
    else:
        cause += " is a different computation from the job's"
    what = f"{shape.text}{others}"
    return accuse(setting.step, "gradient", what, cause, ranks, setting.ranks, name=name, factor=shape.factor)


def _clipped_apart(
    factor: float, shapes: Sequence[tuple[Seen, str, Discrepancy]], times: float, setting: Setting
) -> bool:
    """True if the parameters with a common factor have been clipped by a norm without the others."""
    alike = {name for _, name, shape in shapes if shape.factor and abs(shape.factor - factor) <= NEAR * abs(factor)}
    squares = sum(wide(setting.true[name]).square().sum().item() for name in alike)
    norm = math.sqrt(squares) * abs(factor * times)
    return setting.clip is not None and setting.scaled < 1 and abs(norm - setting.clip) <= NEAR * setting.clip


def _common(one: Seen) -> float:
    """The factor that a clip by a wrong norm gives to gradients that were right before it: the factor of at least half
    of them, and the smaller of two; 1 if they have none."""
    shapes = (_shape(one, name) for name in one.wrong)
    factors = sorted(shape.factor for shape in shapes if shape.pattern == "factor" and shape.factor)
    alike = [sum(abs(f - other) <= NEAR * abs(f) for other in factors) for f in factors]
    most = max(alike, default=0)
    right = most < len(one.true) / 2 or len(one.wrong) < len(one.true)
    return 1.0 if right else factors[alike.index(most)]


def _shape(one: Seen, name: str, times: float = 1.0, slack: float = 0.0) -> Discrepancy:
    """Describes how a parameter's gradient differs from ``times`` the true one."""
    true = one.true[name] if times == 1 else one.true[name] * times
    within = max(0.0 if times == 1 else NEAR, slack / max(largest(true), 1e-300))
    return describe(one.observed[name], true, within)


def cause_of_factor(factor: float, setting: Setting, calls: int, held: int | None = None) -> str:
    """The likely cause of a factor of the whole gradient, or of one parameter that ``held`` ranks have."""
    if not factor:
        return "it is thrown away before the optimizer's step (zero_grad between backward and step)"
    n, count, samples = setting.ranks, setting.count, setting.samples
    known: list[tuple[float, str]] = []
    if calls > 1:
        known += [(calls, f"the loss is not divided by the {calls} forwards of a step (gradient accumulation)")]
        known += [(1 / calls, f"it is divided by the {calls} forwards of a step once too often")]
    if n > 1:
        known += [(n, f"a sum over the {n} ranks where their mean is due")]
        known += [(1 / n, f"it is divided by the {n} ranks once too often")]
    if held and held < n:
        known += [(n / held, f"it is divided by the {held} ranks that have it, and not by all {n}")]
    if n > 1 and calls > 1:
        known += [(n * calls, f"neither the {calls} forwards of a step nor the {n} ranks are divided by")]
        known += [(1 / n / calls, f"{calls} forwards of a step and {n} ranks are divided by once too often")]
    if count > 1:
        known += [(count, f"the sum of the losses is not divided by its count, {count}, or the job's loss is no sum")]
        known += [(count / n, f"a sum of losses, of which only the mean over {n} ranks is taken")] * (n > 1)
        known += [(1 / count, f"it is divided by the count, {count}, once too often")]
        known += [(count / samples, f"the sum is divided by the {samples} samples, and has {count} terms")]
    if setting.scaled < 1:  # a clip leaves nothing of a factor before it, unless it brings the norm below
        scaled, clip = setting.scaled, f"the norm is {setting.norm:.4g}, and the clip {setting.clip:g}"
        known = [(v / scaled, f"{text}, and not clipped" * (v > scaled) or text) for v, text in known]
        known += [(1 / scaled, f"it is not clipped: {clip}")]
        all_have = f"the {n} ranks, each of which has all of it"
        known += [(1 / n, f"the norm that it is clipped by is added up over {all_have}")] * (n > 1)
        known += [(n**-0.5, f"the squares of the norm that it is clipped by are added up over {all_have}")] * (n > 1)
        known += [((setting.clip or 0.0) / norm, text) for norm, text in norms_of_some(setting.witnessed, setting.true)]
    elif setting.clip is None and 0 < factor < 1:
        norm = factor * setting.norm
        if abs(float(f"{norm:.1g}") / norm - 1) < EXPLAINED:
            known += [(factor, f"it is clipped to the norm {norm:.1g}: judge it with --clip {norm:.1g}")]
    found = dict.fromkeys(text for value, text in known if abs(value - 1) > NEAR and abs(factor / value - 1) <= NEAR)
    if not found and setting.scaled < 1:
        return f"the norm that it is clipped by is {factor_text(1 / factor)} times what it should be"
    return " or ".join(found) if found else "a division or a sum that the job does not have"


def calls_of(parts: Parts) -> int:
    """The number of forwards of a rank."""
    return max((group.call + 1 for group, _ in parts), default=1)


def _by_rank(parts: Parts, counts: Sequence[int]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for (group, _), count in zip(parts, counts, strict=True):
        sums[group.rank] = sums.get(group.rank, 0) + count
    return sums


def _alike(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) > 0 and max(values) - min(values) <= NEAR * max(values)


def _list(ranks: Sequence[int], factors: Sequence[float]) -> str:
    return ", ".join(f"{factor_text(f)} on rank {rank}" for rank, f in zip(ranks, factors, strict=True))
