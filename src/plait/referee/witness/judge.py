"""Compares a witnessed run with a single process, and finds the first thing wrong in the order of cause and effect.

    initial parameters ──► step 0: options ─► inputs ─► gradient ─► update ──► step 1: ...

Every link of the chain is checked by itself: the true gradient is computed at the witnessed parameters, and the update
from the witnessed gradient.  If every link holds, the run is that of a single process.  The first link that does not
hold is the cause; its consequences are not reported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plait.messages.progress import counted
from plait.referee.contributions import over_samples
from plait.referee.values import MARGIN, tolerance
from plait.referee.witness.batch_norm import judge_batch_norm
from plait.referee.witness.declared import DTYPES, Rounding, in_rounding, judge_common_factor
from plait.referee.witness.drift import PARTS, apart, declared, excused, in_other_orders, in_parts, slack_of
from plait.referee.witness.gradient import Parts, Setting, compare, judge_gradient
from plait.referee.witness.inputs import ForwardCall, by_rank, covers, groups_of, judge_inputs, repeats_alone
from plait.referee.witness.judgement import Judgement, accuse
from plait.referee.witness.one_sided import explain_update, judge_not_finite, judge_unasked, not_finite
from plait.referee.witness.pieces import Row
from plait.referee.witness.replay import Gradients, Replay, SampleGradient, check_same_job, clipped
from plait.referee.witness.stored import RankRun, RankStep, Witnessed, read_witnessed
from plait.referee.witness.unseen import Unseen
from plait.referee.witness.update import judge_between, judge_options, judge_replicas, judge_update
from plait.referee.wrong import LEFT_OUT
from plait.run.job.config import JobConfig
from plait.run.job.job import Job, make_job
from plait.run.job.own import UserJob
from plait.step.step import num_samples

MOST_PARTS = 64
"""The largest number of a step's forwards whose gradients are computed one by one, to find the missing ones."""


def judge(
    job: Job | UserJob,
    folder: str | Path,
    *,
    clip: float | None = None,
    dtype: Literal["fp32", "fp64"] = "fp32",
    steps: int | None = None,
    rounding: Rounding | None = None,
) -> Judgement:
    """Replays a witnessed run of a job in a single process, and says whether it is the same::

        found = plait.judge(job, "witnessed")
        assert found.equal, found

    Args:
        folder: the folder that ``plait.witness`` has written, with all ranks in it.
        clip: the global norm to which the loop clips; None: it does not.
        dtype: the dtype in which a user's job is computed.
        steps: the number of updates that the loop was to make; None: as many as there are. Updates after the last one
            that ``plait.witness`` writes are not judged.
        rounding: the digits with which the loop multiplies or adds, and the job does not: ``"tf32"`` for a GPU's
            products, ``"bf16"`` or ``"fp16"`` for autocast, an all-reduce or a DDP hook. None: those of the job.

    Returns:
        The judgement: ``equal``, or the first thing that is wrong (``step``, ``phase``, ``name`` of the parameter,
        ``ranks``, ``factor``), its likely ``cause``, and all of it as ``text``.

    Raises:
        ValueError: the folder is missing, damaged, or from another job; or the job cannot be replayed.
    """
    if clip is not None and not (isinstance(clip, int | float) and 0 < clip < math.inf):
        raise ValueError(f"clip is {clip!r}: give the norm that the loop clips to, a number above 0, or None")
    if dtype not in JUDGED:
        raise ValueError(
            f"dtype is {dtype!r}: give {' or '.join(JUDGED)}, in which the job is computed again. A run of 16 bits is "
            f"judged by its fp32 parameters (autocast)"
        )
    if rounding is not None and rounding not in DTYPES:
        raise ValueError(f"rounding is {rounding!r}: give {', '.join(DTYPES)}, or None")
    if isinstance(job, UserJob):
        job = make_job(JobConfig(job=job, dtype=dtype, batch=num_samples(job.batch(0))))
    witnessed = read_witnessed(folder)
    replay = Replay(job, witnessed.buffers)
    check_same_job(witnessed, replay)
    return _Trial(witnessed, replay, clip, steps, rounding).judge()


JUDGED = ("fp32", "fp64")
"""The dtypes in which a user's job is computed again."""


class _Trial:
    """A run under judgement, step by step."""

    def __init__(
        self, witnessed: Witnessed, replay: Replay, clip: float | None, due: int | None, rounding: Rounding | None
    ) -> None:
        self.witnessed, self.replay, self.clip, self.due_steps, self.rounding = witnessed, replay, clip, due, rounding
        self.pieces: list[Mapping[str, Tensor]] = [run.start for run in witnessed.runs]
        """Each rank's parameters."""
        self.last: list[Mapping[str, Tensor]] | None = None
        """Each rank's parameters before the last update."""
        self.previous: Gradients | None = None
        """The observed gradients of the previous step."""
        most = max(run.steps for run in witnessed.runs)
        self.rows: dict[int, Sequence[Row]] = {step: replay.rows(step) for step in range(most)}
        self.residual, self.called = 0.0, False
        self.unseen = Unseen(witnessed)
        if rounding:
            self.unseen.why = f"rounding to {rounding} is declared"
        self.beyond = ""
        """The reason why nothing is judged from this step on."""

    def judge(self) -> Judgement:
        count, ranks = self.witnessed.steps, len(self.witnessed.runs)
        for number in counted("steps judged", range(self.witnessed.steps)):
            steps = [run.step(number) for run in self.witnessed.runs]
            if wrong := self._step(number, steps):
                return wrong
            if self.beyond:
                count = number
                break
            self.unseen.see_step(number, steps)
        if wrong := self.unseen.judge_forgotten() or (self._end() if not self.beyond else None):
            return wrong
        text = (
            f"{count} step{'s' * (count > 1)} of {ranks} rank{'s' * (ranks > 1)}: the run of a single process; the "
            f"largest difference is {self.residual:.2g} of its tensor's largest element{self.beyond}"
        )
        end = text + self.unseen.text()
        return Judgement(None, "equal", "", (), None, self.residual, "", end, judged_to=self.unseen.judged_to)

    def _step(self, number: int, steps: Sequence[RankStep]) -> Judgement | None:
        runs, replay = self.witnessed.runs, self.replay
        changed = [step.of("before") for step in steps]
        if (
            number
            and any(changed)
            and (wrong := judge_between(number - 1, self.witnessed, self.pieces, changed, self.last))
        ):
            return wrong
        self.pieces = [{**own, **new} for own, new in zip(self.pieces, changed, strict=True)]
        start = self.witnessed.whole(self.pieces, replay.shapes)
        if not number and (wrong := judge_replicas(self.witnessed, self.pieces, start)):
            return wrong
        replay.set(start)
        names = {id(p): name for name, p in replay.parameters.items()}
        if wrong := judge_options(number, self.witnessed, steps, names, replay.optimizer):
            return wrong
        self.called |= any(step.calls for step in steps)
        strange = judge_inputs(number, steps, self.rows, self.called)  # no fault if the gradient is right
        for run, step in zip(runs, steps, strict=True):
            if pending := step.of("pending"):
                name = next(iter(pending))
                cause = "its gradient is still a part of a sum over the mesh"
                return strange or accuse(number, "gradient", "", cause, (run.rank,), len(runs), name=name)
        count = replay.count(number)
        true = replay.part(number, None, count)
        if odd := not_finite(true.gradients):
            if wrong := judge_not_finite(number, self.witnessed, steps, true.gradients):
                return strange or wrong
            if not number:
                raise ValueError(
                    f"no step can be judged: in the first one the job's own gradient of {odd[-1]} is not finite"
                )
            self.beyond = f"; not judged from step {number} on, where the job's own gradient of {odd[-1]} is not finite"
            return None
        stepped = {
            name: g
            for name, g in true.gradients.items()
            if any(_given(run, name, s) for run, s in zip(runs, steps, strict=True))
        }
        right, norm, scaled = clipped(stepped, self.clip)
        samples = len(self.rows[number]) or self.replay.job.global_batch
        setting = Setting(number, self.witnessed, right, self.clip, norm, scaled, count, samples)
        seen, most = compare(setting, steps)
        if any(one.wrong for one in seen):
            self._check_draws_nothing(number, true, count)
            whole = bool(over_samples(replay.model))  # parts add up to another gradient
            made = (in_parts(replay, number, right, self.clip, p) for p in PARTS)
            others = list(in_other_orders(replay, number, right, self.clip) if whole else made)
            share = excused(replay, number, max(apart(other, right) for other in others))
            if self.rounding:
                cuts = (1,) if whole else (1, max(2, len(runs)))
                others += (own := list(in_rounding(replay, number, right, self.clip, self.rounding, cuts)))
                share = max(share, declared(max(apart(other, right) for other in own)))
            if share:
                setting = replace(setting, slack=slack_of(share, right))
                seen, most = compare(setting, steps)
                self.unseen.excused = max(self.unseen.excused, MARGIN * share)
            if MARGIN * share > tolerance(replay.job.dtype, 1.0):
                parts = self._parts(number, groups_of(steps, self.rows[number]), count, scaled)
                if wrong := judge_common_factor(setting, steps, seen, others, parts):
                    return wrong
        self.residual = max(self.residual, most)
        self.unseen.see_gradients(right, setting.slack)
        if any(one.wrong for one in seen):
            if strange and not repeats_alone(steps, self.rows[number]):
                return strange
            groups = groups_of(steps, self.rows[number])
            if len(groups) <= MOST_PARTS and (wrong := judge_batch_norm(setting, seen, steps, groups, replay)):
                return wrong
            parts = self._parts(number, groups, count, scaled)
            if self.last is not None and (wrong := self._stale(setting, steps, self.last, start)):
                return wrong
            if wrong := judge_gradient(setting, seen, parts, self.previous):
                return wrong
        if wrong := judge_unasked(number, self.witnessed, steps, true.gradients, self.previous):
            return wrong
        given = self.witnessed.whole([step.of("gradient") for step in steps], replay.shapes)
        # the job's optimizer gets the gradients that the job has, also zeros
        self.previous = {name: given[name] if name in given else torch.zeros_like(g) for name, g in right.items()}
        due = replay.update(self.previous)
        wrong, most = judge_update(number, self.witnessed, steps, self.pieces, due, start)
        if wrong:
            return explain_update(wrong, steps, true.gradients)
        self.unseen.see_updates(due, start)
        self.residual = max(self.residual, most)
        self.last, self.pieces = list(self.pieces), [step.of("after") for step in steps]
        return None

    def _check_draws_nothing(self, number: int, true: SampleGradient, count: int) -> None:
        again = apart(self.replay.part(number, None, count).gradients, true.gradients)
        if again > tolerance(self.replay.job.dtype, 1.0):
            raise ValueError(
                f"the job draws random numbers in its forward: the gradient of step {number} is another one each time, "
                f"{again:.1%} apart, and every engine draws others still: judge the job without them"
            )

    def _stale(
        self, setting: Setting, steps: Sequence[RankStep], last: Sequence[Mapping[str, Tensor]], start: Gradients
    ) -> Judgement | None:
        """Judges the gradients at the parameters before the last update, ``last`` instead of ``start``; None if they
        are wrong there too."""
        number, replay = setting.step, self.replay
        replay.set(self.witnessed.whole(last, replay.shapes))
        gradients = replay.part(number, None, setting.count).gradients
        right, norm, scaled = clipped(gradients, self.clip, setting.true)
        seen, _ = compare(replace(setting, true=right, norm=norm, scaled=scaled), steps)
        replay.set(start)
        if any(one.wrong for one in seen):
            return None
        cause = "the forward reads the values from before the last update: they are not gathered anew"
        ranks = tuple(one.rank for one in seen)
        return accuse(number, "gradient", "", cause, ranks, len(seen), where="parameters", residual=0.0)

    def _parts(self, number: int, groups: Sequence[ForwardCall], count: int, scaled: float) -> Parts:
        """The gradient of each forward (of each rank if there are many), with the factor of the whole's clip."""
        groups, found = by_rank(groups) if len(groups) > MOST_PARTS else groups, []
        if len(groups) > MOST_PARTS:
            return []
        for group in groups:
            part = self.replay.part(number, group.samples, count)
            if any(g.any() for g in part.gradients.values()):  # skips a forward of blank samples alone
                gradients = {name: g * scaled for name, g in part.gradients.items()}
                found.append((group, SampleGradient(gradients, part.count)))
        return found

    def _end(self) -> Judgement | None:
        """Judges the time after the last step, if the loop came to its end on every rank."""
        runs = self.witnessed.runs
        if not all(run.end for run in runs):
            return None
        number, ends = self.witnessed.steps - 1, [run.end for run in runs if run.end]
        if wrong := self._stopped(number + 1, ends):
            return wrong
        made = [run.steps for run in runs]
        if len(set(made)) > 1:
            ranks = tuple(run.rank for run in runs if run.steps < max(made))
            what = f"{min(made)} of {max(made)} steps are made"
            return accuse(number + 1, "update", what, LEFT_OUT, ranks, len(runs), factor=0.0)
        return judge_between(number, self.witnessed, self.pieces, [end.of("before") for end in ends], self.last)

    def _stopped(self, number: int, ends: Sequence[RankStep]) -> Judgement | None:
        """Judges whether updates stop while the samples of step ``number`` go on."""
        ranks = len(ends)
        ended = all(end.about.get("all") for end in ends)  # before the witness had written all its steps
        if self.due_steps is not None and ended and number < self.due_steps:
            what = f"the loop made {number} of {self.due_steps} steps"
        else:
            self.unseen.behind = max((len(end.calls) for end in ends), default=0)
            if not self.unseen.behind or not covers(ends, self.replay, number):
                return None
            what = "its samples enter the model, and no update follows"
        return accuse(number, "update", what, LEFT_OUT, tuple(range(ranks)), ranks, factor=0.0)


def _given(run: RankRun, name: str, step: RankStep) -> bool:
    """True if an optimizer that made a step has the parameter."""
    groups = [piece.group for piece in run.pieces if piece.name == name]
    return any(group is not None and group[0] in step.about["stepped"] for group in groups)
