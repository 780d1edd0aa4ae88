"""Judges gradients that only one side has: there is nothing to compare them with, but they may still be wrong.

the job's          the engine's       verdict
none               a number           wrong: left over from another step, or made up
none               zeros              the update decides: decay and momentum move a parameter that the job leaves alone
zeros              none               the update decides, the other way round
not finite         finite             wrong: something replaces numbers that are not finite
not finite         not finite         the judge has to end there
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from plait.referee.values import finite, gap, largest, scale_of, tolerance
from plait.referee.witness.judgement import Judgement, accuse
from plait.referee.witness.replay import Gradients
from plait.referee.witness.stored import RankRun, RankStep, Witnessed


def judge_unasked(
    number: int, witnessed: Witnessed, steps: Sequence[RankStep], true: Mapping[str, Tensor], previous: Gradients | None
) -> Judgement | None:
    """Reports the first parameter that has a gradient in the engine and none in the job; zeros are judged later.

    Args:
        true: the job's gradients.
        previous: the observed gradients of the previous step.
    """
    found: dict[str, list[tuple[RankRun, Tensor, float]]] = {}
    for run, step in zip(witnessed.runs, steps, strict=True):
        gradients = step.of("gradient")
        for name, gradient in ((name, gradients[name]) for name in reversed(run.regions) if name in gradients):
            if name not in true and (size := largest(gradient)):
                found.setdefault(name, []).append((run, gradient, size))
    if not found:
        return None
    name, seen = next(iter(found.items()))
    ranks = tuple(run.rank for run, _, _ in seen)
    before = previous[name] if previous and name in previous else None
    held = before is not None and all(_same(gradient, run.part(name, before)) for run, gradient, _ in seen)
    cause = "the job's model does not use it in this step"
    if held:
        cause = f"it still holds the gradient of step {number - 1}: zero_grad leaves it out"
    most = max(size for _, _, size in seen)
    what = f"the job gives it none, and the optimizer was given one of up to {most:.3g}"
    return accuse(number, "gradient", what, cause, ranks, len(witnessed.runs), name=name)


def _same(one: Tensor, other: Tensor) -> bool:
    return gap(one, other) <= tolerance(one.dtype, scale_of(other))


def explain_update(wrong: Judgement, steps: Sequence[RankStep], true: Mapping[str, Tensor]) -> Judgement:
    """Adds the cause to a wrong update, if one side's gradient is None and the other's is zeros."""
    given = any(wrong.name in step.of("gradient") for step in steps)
    if not wrong.name or given == (wrong.name in true):
        return wrong
    cause = "its gradient is zeros, and the job's is None: the optimizer's decay and momentum move it all the same"
    if not given:
        cause = "its gradient is None, and the job's is zeros: the optimizer's decay and momentum leave it out"
    return replace(wrong, cause=cause, text=wrong.text.removesuffix(wrong.cause) + cause)


def not_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """The names of the gradients that are not finite everywhere."""
    return [name for name, gradient in gradients.items() if not finite(gradient).all()]


def judge_not_finite(
    number: int, witnessed: Witnessed, steps: Sequence[RankStep], true: Mapping[str, Tensor]
) -> Judgement | None:
    """Reports the first parameter whose gradient is finite although the job's is not."""
    for name in reversed(not_finite(true)):
        ranks = []
        for run, step in zip(witnessed.runs, steps, strict=True):
            if name in run.regions and (given := step.of("gradient").get(name)) is not None:
                odd = ~finite(run.part(name, true[name]))
                if bool((odd & finite(given)).any()):
                    ranks.append(run.rank)
        if ranks:
            cause = "something replaces what is not finite (nan_to_num, a sum that skips it)"
            what = "it is finite where the job's own gradient is not"
            return accuse(number, "gradient", what, cause, tuple(ranks), len(witnessed.runs), name=name)
    return None
