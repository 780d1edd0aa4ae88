"""The first wrong tensor: where a layout leaves the run of a single process.

    verdict "different" ──► the step ──► layout and replay run again, recorded in that step and the one before
                                             │ compared in causal order
        parameters read ─► outputs ─► loss ─► gradients of outputs ─► contributions of the microbatches ─► sums over
        microbatches and ranks ─► norm ─► clipped ─► updated ─► parameters read in the next step ...

The earliest difference is the fault's place, for all that comes before it is right.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._pytree import keystr, tree_flatten_with_path

from plait.referee.difference import Discrepancy, describe
from plait.referee.values import wide
from plait.referee.verify.compare import BITWISE, TOLERANCES, Finding, against_tree, asked, label_of, name_of, same_run
from plait.referee.verify.ends import first_clipped, first_in_norm, first_in_sums, first_published, first_updated
from plait.referee.verify.passes import first_in_passes
from plait.referee.verify.plain import loss_in_parts
from plait.referee.verify.record import RankRecord
from plait.referee.verify.reference import Piece, Record, TiedWeights, run_reference
from plait.referee.verify.traced import RankTrace, ReferenceTracer, trace_layout
from plait.referee.verify.traces import Traces
from plait.referee.wrong import FirstWrong, cause_of_norm
from plait.run.config import RunConfig
from plait.run.job.job import Job
from plait.step.step import num_samples
from plait.table.additions import additions


def locate(
    job: Job, config: RunConfig, ranks: Sequence[RankRecord], reference: Record, findings: Sequence[Finding]
) -> FirstWrong | None:
    """Run a layout that is not its replay once more, and the replay, and find the first wrong tensor.

    Neither is compiled: a tape needs to see into the modules.

    Args:
        ranks: what the ranks recorded, and ``reference`` what the replay did.
        findings: of ``against_tree``; what honest runs excuse is not looked at.

    Returns:
        None where the layout is right this time, among threads of one process.
    """
    rounding = {name_of(f) for f in findings if f.kind == "gradient" and f.excused}
    window = window_of(first_step(config, ranks, reference, rounding))
    job, config = replace(job, compile=False), replace(config, compile=False)
    return search(trace_layout(job, config, window), job, config, window, ranks[0].ties, rounding)


def locate_in_plain(
    job: Job, ranks: Sequence[RankRecord], replay: Record, plain: Record, findings: Sequence[Finding]
) -> FirstWrong | None:
    """The first wrong number or gradient of ``against_plain``'s findings; the ``replay`` has the same fault."""
    wrong = {(f.kind, f.name) for f in findings if not f.equal}
    first, num = ranks[0], len(ranks)
    for step, (loss, norm) in enumerate(zip(first.losses, first.norms, strict=True)):
        if ("loss", f"step {step + 1}") in wrong:
            why = SHARED if step else not_a_sum(job, len(replay.microbatch_losses[0])) or SHARED
            return FirstWrong(step, "loss", "", (), num, _described(loss, plain.losses[step]), cause=why)
        for name in reversed(plain.gradients[step] if step == 0 else {}):
            for own, piece in ((r, p) for r in ranks if r.gradients for p in r.gradients[0] if p[0] == name):
                if ("gradient", label_of(piece, 0, own.rank)) in wrong:
                    gap = describe(own.gradients[0][piece], same_run(own, plain.gradients[0][name], piece), 0.0)
                    return FirstWrong(0, "sum", name, (own.rank,), num, gap, cause=SHARED)
        if ("norm", f"step {step + 1}") in wrong:
            owned = [sum(_square(r, p, plain) for p in r.norm_pieces) for r in ranks] if step == 0 else []
            why = cause_of_norm(norm or 0.0, plain.norms[step] or 0.0, owned)
            found = _described(norm, plain.norms[step])
            return FirstWrong(step, "norm", "", (), num, found, cause=f"{why}; {SHARED}")
    last = len(first.losses) - 1
    for name, value in first.parameters.items():
        if ("parameter", name) in wrong:
            return FirstWrong(last, "update", name, (), num, describe(value, plain.parameters[name]), cause=SHARED)
    return None


def not_a_sum(job: Job, num_parts: int) -> str:
    """Why the loss of a whole batch is another number in a layout, where plain PyTorch says so too; else empty."""
    whole, parts = loss_in_parts(job, num_parts)
    if not math.isfinite(whole) or abs(whole - parts) <= TOLERANCES[job.dtype][0] * abs(whole):
        return ""
    offsets = packed_by(job.microbatches(0, 0, 1, 1)[0])
    norms = [name for name, module in job.build().named_modules() if isinstance(module, BatchNorm)]
    why = (
        f"{norms[0]!r} normalises over the samples of a microbatch (nn.SyncBatchNorm over all ranks' samples of it)"
        if norms
        else "does it compare samples with one another, as contrastive losses do, or take a mean?"
    )
    if offsets:
        why = (
            f"{offsets} of the batch has the offsets of packed sequences, and the batch is cut between its rows, which "
            f"are tokens: give each sequence a row of its own, padded"
        )
    return (
        f"the loss of a batch is not the sum of its parts' in plain PyTorch either, without dropout: {whole:.6g} at "
        f"once, {parts:.6g} in {num_parts} parts: {why}"
    )


def packed_by(batch: Any) -> str:
    """The place in a batch of a tensor such as ``cu_seqlens`` [sequences + 1]: offsets from 0 to the number of rows."""
    rows = num_samples(batch)
    for path, leaf in tree_flatten_with_path(batch)[0]:
        whole = isinstance(leaf, Tensor) and leaf.dim() == 1 and len(leaf) > 1 and not leaf.is_floating_point()
        if whole and (int(leaf[0]), int(leaf[-1])) == (0, rows) and bool((leaf.diff() >= 0).all()):
            return keystr(path)
    return ""


SHARED = "the replay, which shares code with the engine, has it too"


def _described(ours: float | None, right: float | None) -> Discrepancy:
    a, b = (torch.tensor(math.nan if value is None else value).double() for value in (ours, right))
    return describe(a, b)


def _square(record: RankRecord, piece: Piece, plain: Record) -> float:
    whole = plain.gradients[0].get(piece[0])
    return 0.0 if whole is None else wide(same_run(record, whole, piece)).square().sum().item()


def window_of(step: int) -> range:
    """The steps to record where a fault shows in this one: what it is given may be the fault of the step before."""
    return range(max(0, step - 1), step + 1)


def search(
    ranks: Sequence[RankTrace],
    job: Job,
    config: RunConfig,
    window: Sequence[int],
    ties: TiedWeights,
    rounding: Collection[str] = (),
) -> FirstWrong | None:
    """Replay a layout of which these are the traces, and find the first difference."""
    one, within = ReferenceTracer(window), asked(config)
    pieces = [t.norm_pieces for t in sorted(ranks, key=lambda t: t.rank)] if within == BITWISE else None
    mesh, order = config.parsed_mesh, additions(config.row)
    settings: dict[str, Any] = {"clip": config.clip, "norm_pieces": pieces, "ties": ties, "listener": one}
    record = run_reference(job, mesh, config.microbatches, order, window[-1] + 1, keep_gradients=False, **settings)
    for step, traced in one.steps.items():
        traced.norm = record.norms[step]
    traces = Traces(ranks, one, config, within, ties, rounding)
    for step in window:
        for look in (first_in_passes, first_in_sums, first_in_norm, first_clipped, first_updated):
            if (found := look(traces, step)) is not None:
                return found
    return first_published(traces)


def first_step(
    config: RunConfig, ranks: Sequence[RankRecord], reference: Record, rounding: Collection[str] = ()
) -> int:
    """The first step, from 0, in which a loss, gradient or norm is not what was asked; the last one if none is.

    ``rounding`` names parameters whose gradients are not looked at.
    """
    within = asked(config)

    def differs(step: int) -> bool:  # in this step, or before it
        lists = reference.losses, reference.microbatch_losses, reference.gradients, reference.norms
        until = Record(*(one[: step + 1] for one in lists))  # type: ignore[arg-type]
        findings = against_tree([_until(record, step) for record in ranks], until, within)
        return not all(f.equal or (f.kind == "gradient" and name_of(f) in rounding) for f in findings)

    return bisect_left(range(len(reference.losses) - 1), True, key=differs)


def _until(record: RankRecord, step: int) -> RankRecord:
    """A rank's record of the steps up to this one, without what it ended with."""
    lists = {k: getattr(record, k)[: step + 1] for k in ("losses", "local_losses", "norms", "made", "gradients")}
    return RankRecord(record.rank, record.data_rank, tensor_rank=record.tensor_rank, cuts=record.cuts, **lists)
