"""The first wrong tensor: where a layout leaves the run of a single process.

    verdict "different" ──► the step ──► layout and replay run again, recorded in that step and the one before
                                             │ compared in causal order
        parameters read ─► outputs ─► loss ─► gradients of outputs ─► contributions of the microbatches ─► sums over
        microbatches and ranks ─► norm ─► clipped ─► updated ─► parameters read in the next step ...

The earliest difference is the fault's place, for all that comes before it is right.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.config import RunConfig
from plait.core.additions import additions
from plait.job.job import Job
from plait.referee.difference import Discrepancy, describe
from plait.referee.wrong import FirstWrong, cause_of_norm
from plait.verify.compare import BITWISE, against_tree, asked, find, full_batch, same_run
from plait.verify.ends import first_clipped, first_in_norm, first_in_sums, first_published, first_updated
from plait.verify.passes import first_in_passes
from plait.verify.record import RankRecord
from plait.verify.reference import Piece, Record, TiedWeights, run_reference
from plait.verify.traced import RankTrace, ReferenceTracer, trace_layout
from plait.verify.traces import Traces


def locate(job: Job, config: RunConfig, ranks: Sequence[RankRecord], reference: Record) -> FirstWrong | None:
    """Run a layout that is not its replay once more, and the replay, and find the first wrong tensor.

    Neither is compiled: a tape needs to see into the modules.

    Args:
        ranks: what the ranks recorded, and ``reference`` what the replay did.

    Returns:
        None where the layout is right this time, among threads of one process.
    """
    window = window_of(first_step(config, ranks, reference))
    job, config = replace(job, compile=False), replace(config, compile=False)
    return search(trace_layout(job, config, window), job, config, window, ranks[0].ties)


def locate_in_plain(config: RunConfig, ranks: Sequence[RankRecord], plain: Record) -> FirstWrong | None:
    """The first wrong number or gradient where only plain PyTorch differs: the replay has the same fault."""
    within = full_batch(config)
    first = ranks[0]
    for step, (loss, norm) in enumerate(zip(first.losses, first.norms, strict=True)):
        bound = within.drift if step else within.rounding
        found = _differs(loss, plain.losses[step], bound)
        if found is not None:
            return FirstWrong(step, "loss", "", (), len(ranks), found, cause=SHARED)
        for name in reversed(plain.gradients[step] if step == 0 else {}):
            pieces = [(r, p) for r in ranks if r.gradients for p in r.gradients[0] if p[0] == name]
            for r, piece in pieces:
                right = same_run(r, plain.gradients[0][name], piece)
                gap = describe(r.gradients[0][piece], right, bound)
                if gap.pattern != "equal":
                    return FirstWrong(0, "sum", name, (r.rank,), len(ranks), gap, cause=SHARED)
        found = _differs(norm, plain.norms[step], bound)
        if found is not None:
            owned = [sum(_square(r, p, plain) for p in r.norm_pieces) for r in ranks] if step == 0 else []
            why = cause_of_norm(norm or 0.0, plain.norms[step] or 0.0, owned)
            return FirstWrong(step, "norm", "", (), len(ranks), found, cause=f"{why}; {SHARED}")
    last = len(first.losses) - 1
    for name, value in first.parameters.items():
        right = plain.parameters.get(name, value)
        if not find("parameter", name, value, right, within.parameter, within.length).equal:
            return FirstWrong(last, "update", name, (), len(ranks), describe(value, right), cause=SHARED)
    return None


SHARED = "the replay, which shares code with the engine, has it too"


def _differs(ours: float | None, right: float | None, within: float) -> Discrepancy | None:
    if ours is None or right is None:
        return None
    found = describe(torch.tensor(ours).double(), torch.tensor(right).double(), within)
    return None if found.pattern == "equal" else found


def _square(record: RankRecord, piece: Piece, plain: Record) -> float:
    whole = plain.gradients[0].get(piece[0])
    return 0.0 if whole is None else same_run(record, whole, piece).double().square().sum().item()


def window_of(step: int) -> range:
    """The steps to record where a fault shows in this one: what it is given may be the fault of the step before."""
    return range(max(0, step - 1), step + 1)


def search(
    ranks: Sequence[RankTrace], job: Job, config: RunConfig, window: Sequence[int], ties: TiedWeights
) -> FirstWrong | None:
    """Replay a layout of which these are the traces, and find the first difference."""
    one, within = ReferenceTracer(window), asked(config)
    pieces = [t.norm_pieces for t in sorted(ranks, key=lambda t: t.rank)] if within == BITWISE else None
    mesh, order = config.parsed_mesh, additions(config.row)
    settings: dict[str, Any] = {"clip": config.clip, "norm_pieces": pieces, "ties": ties, "listener": one}
    record = run_reference(job, mesh, config.microbatches, order, window[-1] + 1, keep_gradients=False, **settings)
    for step, traced in one.steps.items():
        traced.norm = record.norms[step]
    traces = Traces(ranks, one, config, within, ties)
    for step in window:
        for look in (first_in_passes, first_in_sums, first_in_norm, first_clipped, first_updated):
            if (found := look(traces, step)) is not None:
                return found
    return first_published(traces)


def first_step(config: RunConfig, ranks: Sequence[RankRecord], reference: Record) -> int:
    """The first step, from 0, in which a loss, gradient or norm is not what was asked; the last one if none is."""
    within = asked(config)

    def differs(step: int) -> bool:  # in this step, or before it
        lists = reference.losses, reference.microbatch_losses, reference.gradients, reference.norms
        until = Record(*(one[: step + 1] for one in lists))  # type: ignore[arg-type]
        findings = against_tree([_until(record, step) for record in ranks], until, within)
        return not all(finding.equal for finding in findings)

    return bisect_left(range(len(reference.losses) - 1), True, key=differs)


def _until(record: RankRecord, step: int) -> RankRecord:
    """A rank's record of the steps up to this one, without what it ended with."""
    lists = {k: getattr(record, k)[: step + 1] for k in ("losses", "local_losses", "norms", "made", "gradients")}
    return RankRecord(record.rank, record.data_rank, tensor_rank=record.tensor_rank, cuts=record.cuts, **lists)
