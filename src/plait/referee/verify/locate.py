"""Finds the first wrong tensor: the place at which a layout leaves the run of a single process.

    verdict "different" ──► the step ──► layout and replay run again, traced in that step and the one before
                                             │ compared in causal order
        parameters read ─► outputs ─► loss ─► gradients of outputs ─► contributions of the microbatches ─► sums over
        microbatches and ranks ─► norm ─► clipped ─► updated ─► parameters read in the next step ...

The earliest difference is the fault's place, because everything before it is right.  Microbatches do not depend on each
other within a step, so the one that goes wrong soonest after its beginning counts.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.referee.contributions import over_samples
from plait.referee.difference import Discrepancy, describe
from plait.referee.values import rounding
from plait.referee.verify.causes import cause_of, cause_of_moved, squares_of
from plait.referee.verify.compare import BITWISE, Finding, Measures, Pair, asked, links, missing, pairs
from plait.referee.verify.observed import OneStep, RankRecord, Record
from plait.referee.verify.plain import loss_in_parts
from plait.referee.verify.record import trace_layout
from plait.referee.verify.reference import run_reference
from plait.referee.verify.traces import Traces, Wrong
from plait.referee.wrong import FirstWrong, Phase, cause_of_norm, said
from plait.run.config.machine import resolve_device
from plait.run.config.settings import RunConfig
from plait.run.job.job import Job
from plait.table.additions import additions


def locate(job: Job, config: RunConfig, ranks: Sequence[RankRecord], findings: Sequence[Finding]) -> FirstWrong | None:
    """Runs a layout that differs from its replay again, with the replay, and finds the first wrong tensor.

    Neither is compiled: a tape needs to see into the modules.

    Args:
        ranks: the ranks' records.
        findings: the result of ``against_tree``; tensors that honest runs excuse are not searched.

    Returns:
        None if the layout is right this time, on threads of one process.
    """
    excused = {finding.tensor for finding in findings if finding.kind == "gradient" and finding.excused}
    window = window_of(first_step(findings))
    job, config = replace(job, compile=False), config.with_flags(compile=False)
    return search(trace_layout(job, config, window), job, config, window, excused)


def required(config: RunConfig) -> Measures:
    """The requirement of a layout's replay."""
    return asked(config.machine.parsed_mesh, config.task, config.dtypes.computed)


def replay(
    job: Job, config: RunConfig, ranks: Sequence[RankRecord], run: Callable[..., Record] = run_reference, **options: Any
) -> Record:
    """Runs the single process that adds in the order of the config's layout; ``ranks`` are the layout's records."""
    pieces = [r.norm_pieces for r in sorted(ranks, key=lambda r: r.rank)] if required(config) == BITWISE else None
    layout = config.machine.parsed_mesh, config.layout.microbatches, additions(config.row), config.task.samples.steps
    where = {"ties": ranks[0].ties, "device": resolve_device(config.machine)}
    return run(job, *layout, clip=config.task.update.clip, norm_pieces=pieces, **where, **options)


def first_step(findings: Sequence[Finding]) -> int:
    """The first step, from 0, with a finding that is not equal; the last step if there is none."""
    wrong = [finding.step for finding in findings if not finding.equal]
    return min(wrong, default=max(finding.step for finding in findings))


def window_of(step: int) -> range:
    """The steps to trace if a fault shows in this one: its inputs may be the fault of the previous step."""
    return range(max(0, step - 1), step + 1)


PASSES: tuple[Phase, ...] = ("parameter", "forward", "loss", "backward", "contribution")
GROUPS: Sequence[tuple[tuple[Phase, ...], str]] = (
    (PASSES, ""),
    (("sum",), "every microbatch's contribution to it"),
    (("norm",), "every sum of the gradients"),
    (("clip",), "the norm"),
    (("update",), "every clipped gradient"),
    (("publish",), "every update"),
)
"""The phases of a step in causal order, with the last right value if a phase is the first wrong one."""


def search(
    ranks: Sequence[RankRecord], job: Job, config: RunConfig, window: Sequence[int], excused: Collection[str] = ()
) -> FirstWrong | None:
    """Replays the layout of these traces, and finds the first difference."""
    one = replay(job, config.with_flags(steps=window[-1] + 1), ranks, window=window, keep_links=False)
    settings = config.machine.parsed_mesh, config.layout.microbatches, config.task.update.clip
    traces = Traces(ranks, one, *settings, required(config), ranks[0].ties, excused)
    seen: dict[tuple[int, Phase], list[Pair]] = {}
    for pair in (*pairs(ranks, one), *missing(ranks, one)):
        seen.setdefault((pair.where.step, pair.where.phase), []).append(pair)
    for step in window:
        order_of = places(one.steps[step])
        for phases, after in GROUPS:
            found = []
            for pair in (pair for phase in phases for pair in seen.get((step, phase), ())):
                if pair.where.phase == "loss" and pair.where.microbatch is None:
                    continue  # the sum of the microbatches' losses
                if (discrepancy := traces.discrepancy(pair)) is not None:
                    found.append(Wrong(order_of.get(pair.where[1:3] + pair.where[4:5], 0), pair, discrepancy))
            if found:
                return _told(traces, sorted(found, key=lambda w: w.order), order_of, after)
    return None


Places = Mapping[tuple[str, str, int], int]
"""The place of each phase, name and call in a step."""


def places(step: OneStep) -> Places:
    """Places in causal order: a microbatch's places, with the loss between its forward and its backward, then sums and
    the values made from them in the order of the backward."""
    forward = [(m.phase, m.name, m.call) for m in step.marks if m.phase in ("parameter", "forward")]
    backward = [(m.phase, m.name, m.call) for m in step.marks if m.phase in ("backward", "contribution")]
    contributed = [name for phase, name, _ in backward if phase == "contribution"]
    names = dict.fromkeys([*contributed, *step.summed, *step.updated])
    ends = [(phase, name, 0) for phase in ("sum", "clip", "update") for name in names]
    return {place: i for i, place in enumerate(dict.fromkeys([*forward, ("loss", "", 0), *backward, *ends]))}


def _told(traces: Traces, wrong: Sequence[Wrong], order_of: Places, after: str) -> FirstWrong:
    """Describes the first wrong pair in causal order."""
    first = wrong[0]
    where = first.pair.where
    alike = [w for w in wrong if w.pair.where.phase == where.phase]
    same = [w for w in alike if (w.order, w.name) == (first.order, first.name)]
    reads, after_loss = where.phase == "parameter", False
    if where.phase in PASSES:
        earlier = [place for place, i in order_of.items() if i < first.order]
        after_loss = bool(earlier) and earlier[-1][0] == "loss"
        after = said(earlier[-1][0], earlier[-1][1]) if earlier else ""  # type: ignore[arg-type]
    if where.phase == "clip" and traces.clip is None:
        after = "every sum of the gradients"
    microbatches = {w.pair.where.microbatch for w in same if not reads} - {None}
    return FirstWrong(
        where.step,
        "initial values" if reads and where.step == 0 else where.phase,
        where.name,
        tuple(dict.fromkeys(w.pair.rank for w in same if w.pair.rank >= 0)),
        len(traces.ranks),
        first.discrepancy,
        tuple(sorted(m for m in microbatches if m is not None)),
        after,
        len({w.name for w in alike} - {where.name}),
        cause_of(traces, alike, after_loss=after_loss),
    )


# ---- against plain PyTorch ----------------------------------------------------------------------------------------

SHARED = "the replay, which shares code with the engine, has it too"
ONE_SIDED = Discrepancy("shape", text="only one side has it")


def locate_in_plain(
    job: Job, ranks: Sequence[RankRecord], replay: Record, plain: Record, findings: Sequence[Finding]
) -> FirstWrong | None:
    """The first wrong link of ``against_plain``'s findings; the ranks have the same values as the ``replay``."""
    wrong = [pair for pair, finding in zip(links(replay, plain), findings, strict=True) if not finding.equal]
    if not wrong:
        return None
    where, ours, right = wrong[0].where, wrong[0].ours, wrong[0].theirs
    if ours is None or right is None:
        return FirstWrong(where.step, where.phase, where.name, (), len(ranks), ONE_SIDED, cause=SHARED)
    cause = ""
    own, all_of_them = len(ranks[0].steps[0].losses), len(replay.steps[0].losses)
    if where.phase in ("loss", "sum") and (cause := not_a_sum(job, all_of_them // own, own)):
        return FirstWrong(where.step, where.phase, where.name, (), len(ranks), describe(ours, right), cause=cause)
    if where.phase == "norm":
        owned = [squares_of(rank, replay.steps[where.step].summed) for rank in ranks]
        cause = cause_of_norm(ours.item(), right.item(), owned)
    if where.phase == "update":
        others = [pair for pair in wrong if pair.where[:2] == where[:2]]
        every = len(others) == len(plain.steps[where.step].updated)
        cause = cause_of_moved(ours, right, replay.before(where.step, where.name), every=every)
    told = "; ".join(filter(None, (cause, SHARED)))
    return FirstWrong(where.step, where.phase, where.name, (), len(ranks), describe(ours, right), cause=told)


def not_a_sum(job: Job, data_ranks: int, microbatches: int) -> str:
    """Says why a step differs in a layout, if it differs in parts in plain PyTorch too; else empty."""
    whole, parts, moved = loss_in_parts(job, data_ranks, microbatches)
    if not math.isfinite(whole):
        return ""
    if abs(whole - parts) <= rounding(job.dtype) * abs(whole):
        return moved and (
            f"{moved!r} changes its buffers in each forward, and with them what it computes, so the {microbatches} "
            f"microbatches of a rank are a different run from one whole batch, in plain PyTorch too"
        )
    norms = over_samples(job.build())
    why = (
        f"{norms[0]!r} normalises over the samples of a microbatch (nn.SyncBatchNorm over all ranks' samples of it)"
        if norms
        else "does it compare samples with one another, as contrastive losses do, or take a mean?"
    )
    return (
        f"the loss of a batch is not the sum of its parts' in plain PyTorch either, without dropout: {whole:.6g} at "
        f"once, {parts:.6g} in {data_ranks * microbatches} parts: {why}"
    )
