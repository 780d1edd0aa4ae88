"""Says in words why a tensor is wrong: by its phase, the shape of its difference, and other tensors with its value."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plait.referee.contributions import cause_of_sum, contributions, explain, groupings
from plait.referee.difference import describe, factor_text
from plait.referee.tape import Where
from plait.referee.values import wide
from plait.referee.verify.observed import OneStep, Piece, RankRecord
from plait.referee.verify.traces import Traces, Wrong
from plait.referee.wrong import Phase, cause_of_norm, cause_of_parameter, cause_of_update


def cause_of(traces: Traces, wrong: Sequence[Wrong], *, after_loss: bool = False) -> str:
    """The likely cause; empty if there is none.

    Args:
        wrong: all wrong pairs of a phase, the first one first.
        after_loss: True if the last right tensor before it is the loss.
    """
    if after_loss and (scaled := _scaled(traces, [w for w in wrong if w.order == wrong[0].order])):
        return f"the loss is scaled wrongly: {scaled}"
    of_phase = CAUSES.get(wrong[0].pair.where.phase)
    return of_phase(traces, wrong) if of_phase else ""


# ---- forwards and backwards ---------------------------------------------------------------------------------------


def _of_read(traces: Traces, wrong: Sequence[Wrong]) -> str:
    first = wrong[0]
    step = first.pair.where.step
    stale = step > 0 and _is_another(traces, first, traces.one.steps[step - 1], same=True) is not None
    return cause_of_parameter(first.discrepancy.pattern, stale=stale, at_rest=False)


def _of_pass(traces: Traces, wrong: Sequence[Wrong]) -> str:
    first = wrong[0]
    phase, pattern = first.pair.where.phase, first.discrepancy.pattern
    if pattern == "not finite":
        return "a parameter may be read while its values are elsewhere"
    if (other := _is_another(traces, first, traces.one.steps[first.pair.where.step])) is not None:
        return f"it is that of microbatch {other}"
    if phase == "backward" and pattern == "nothing":
        return "no gradient comes back to it"
    if phase == "forward":
        return (
            "its inputs and parameters are right: it computes something else (another mask or position, a missing sum)"
        )
    return ""


def _scaled(traces: Traces, same: Sequence[Wrong]) -> str:
    """Names the factors of the microbatches' gradients in words; empty if they have none."""
    where, patterns = same[0].pair.where, {w.discrepancy.pattern for w in same}
    one = traces.one.steps[where.step]
    if where.phase != "backward" or not patterns <= {"factor", "nothing"}:
        return ""
    if _is_another(traces, same[0], one) is not None:
        return ""
    by_rank = {w.pair.rank: w.discrepancy.factor or 0.0 for w in same if w.pair.where.microbatch == where.microbatch}
    if traces.mesh.context > 1 and len({factor_text(factor) for factor in by_rank.values()}) > 1:
        parts = " and ".join(f"{factor_text(factor)} times on rank {rank}" for rank, factor in by_rank.items())
        return f"the steps of time of microbatch {where.microbatch} count {parts}, each rank by another number"
    factors = {w.pair.where.microbatch: w.discrepancy.factor or 0.0 for w in same}
    grouping = groupings(traces.mesh.data_size, traces.microbatches)[-1]
    names = grouping.names if len(grouping.names) == len(one.counts) else None
    return explain([factors.get(m, 1.0) for m in one.counts], list(one.counts.values()), names)


def _is_another(traces: Traces, wrong: Wrong, step: OneStep, *, same: bool = False) -> int | None:
    """The other microbatch whose value this is; ``same``: any microbatch, in another step."""
    where, ours = wrong.pair.where, wrong.pair.ours
    assert ours is not None
    if where.phase == "loss":
        return next((m for m, loss in step.losses.items() if loss == ours.item() and m != where.microbatch), None)
    for mark, theirs in step.marks.items() if ours.any() else ():
        if (mark.phase, mark.name, mark.call) == (where.phase, where.name, where.call):
            found = traces.compared(traces.of(wrong.pair.rank), where, ours, theirs)
            if found is not None and found.pattern == "equal" and (same or mark.microbatch != where.microbatch):
                return mark.microbatch
    return None


# ---- sums, norm, updates ------------------------------------------------------------------------------------------


def _of_sum(traces: Traces, wrong: Sequence[Wrong]) -> str:
    """Says in words what a gradient holds instead of every microbatch's contribution once."""
    first, step = wrong[0].pair, wrong[0].pair.where.step
    if first.piece is None:
        return "no rank owns it, or none got its gradient"
    trace, right = traces.of(first.rank), traces.one.steps[step]
    if others := [k for use in traces.ties.get(first.where.name, ()) for k in use if k != first.where.name]:
        return _of_tied_sum(trace, right, wrong[0], [first.where.name, *others])
    mine = [w.pair for w in wrong if w.pair.rank == first.rank and w.pair.piece]
    ways = groupings(traces.mesh.data_size, traces.microbatches)
    for pairs in (mine, mine[:1]):  # several parameters show more, if the same happened to all
        pieces = [pair.piece for pair in pairs if pair.piece]
        parts = [[_contribution(trace, right, step, m, p[0], p) for p in pieces] for m in right.counts]
        before = traces.one.steps[step - 1].summed if step else {}
        last = [trace.take(before[p[0]], p) for p in pieces] if before else None
        ours = [pair.ours for pair in pairs if pair.ours is not None]
        if told := cause_of_sum(ours, parts, list(right.counts.values()), ways, last):
            return told
    return ""


def _of_tied_sum(trace: RankRecord, right: OneStep, wrong: Wrong, keys: Sequence[str]) -> str:
    """Says in words which uses of a weight are in its gradient."""
    piece, ours, step = wrong.pair.piece, wrong.pair.ours, wrong.pair.where.step
    assert piece is not None and ours is not None
    uses = [[sum(_contribution(trace, right, step, m, key, piece) for m in right.counts)] for key in keys]
    found = contributions([ours], uses)  # type: ignore[arg-type]
    if not found.determined or found.rest > 1e-4:
        return ""
    told = explain(found.coefficients, names=[f"its use as {key!r}" for key in keys])
    return told or "the right terms, added in another order"


def _contribution(trace: RankRecord, right: OneStep, step: int, microbatch: int, key: str, piece: Piece) -> Tensor:
    if (part := right.marks.get(Where(step, "contribution", key, microbatch))) is None:
        return torch.zeros(piece[2] - piece[1], dtype=torch.float64)
    return trace.take(part, piece) / right.scale


def _of_norm(traces: Traces, wrong: Sequence[Wrong]) -> str:
    first = wrong[0]
    if first.discrepancy.pattern == "shape" or first.discrepancy.max_rel <= 1e-5:
        return "" if first.discrepancy.pattern == "shape" else "the same squares, added in another order"
    assert first.pair.ours is not None and first.pair.theirs is not None
    sums = traces.one.steps[first.pair.where.step].summed
    owned = [squares_of(trace, sums) for trace in traces.ranks]
    return cause_of_norm(first.pair.ours.item(), first.pair.theirs.item(), owned)


def squares_of(trace: RankRecord, sums: Mapping[str, Tensor]) -> float:
    """The sum of the squares of the elements that a rank owns, as the single process has them."""
    pieces = [trace.take(sums[piece[0]], piece) for piece in trace.norm_pieces if piece[0] in sums]
    return float(sum(wide(piece).square().sum().item() for piece in pieces))


def _of_update(traces: Traces, wrong: Sequence[Wrong]) -> str:
    pair = wrong[0].pair
    if pair.piece is None or pair.ours is None or pair.theirs is None:
        return "no rank owns it"
    old = traces.of(pair.rank).take(traces.one.before(pair.where.step, pair.where.name), pair.piece)
    every = len({w.name for w in wrong}) == len(traces.one.steps[pair.where.step].updated)
    return cause_of_moved(pair.ours, pair.theirs, old, every=every)


def cause_of_moved(ours: Tensor, right: Tensor, old: Tensor, *, every: bool) -> str:
    """Says in words why a parameter that was ``old`` is wrong after its update; ``every``: all parameters are."""
    moved = describe(ours - old, right - old)
    if moved.inside == "nothing":
        return f"a part was not updated: {moved.text.split(':')[0]}"
    factor = moved.factor if moved.pattern in ("factor", "nothing") else None
    far = f"it moved {factor_text(factor)} times as far as it should: " if factor else ""
    return far + cause_of_update(factor, every=every)


def _of_published(traces: Traces, wrong: Sequence[Wrong]) -> str:
    pair = wrong[0].pair
    if pair.ours is None:
        return ""
    ours, old = pair.ours.cpu(), traces.one.before(pair.where.step, pair.where.name)
    stale, at_rest = torch.equal(ours, old.to(ours.dtype)), bool(ours.isnan().all())
    return cause_of_parameter(wrong[0].discrepancy.pattern, stale=stale, at_rest=at_rest)


CAUSES: Mapping[Phase, Callable[[Traces, Sequence[Wrong]], str]] = {
    "parameter": _of_read,
    "forward": _of_pass,
    "loss": _of_pass,
    "backward": _of_pass,
    "contribution": _of_pass,
    "sum": _of_sum,
    "norm": _of_norm,
    "update": _of_update,
    "publish": _of_published,
}
