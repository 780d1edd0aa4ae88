"""The first wrong tensor behind the backwards of a step: sums, norm, clipped gradients, updates, what is published."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.referee.contributions import cause_of_sum, contributions, explain, groupings
from plait.referee.difference import Discrepancy, describe
from plait.referee.tape import Mark
from plait.referee.values import wide
from plait.referee.verify.compare import same_run
from plait.referee.verify.reference import Piece
from plait.referee.verify.traced import RankTrace, TracedStep
from plait.referee.verify.traces import Traces, Wrong
from plait.referee.wrong import FirstWrong, Phase, cause_of_norm, cause_of_parameter, cause_of_update


def first_in_sums(traces: Traces, step: int) -> FirstWrong | None:
    """The first gradient, in the order of a backward, whose sum over microbatches and ranks is wrong."""
    wrong = _wrong_pieces(traces, step, "summed")
    if not wrong:
        return None
    return _told(
        traces, step, "sum", wrong, "every microbatch's contribution to it", _cause_of_sum(traces, wrong, step)
    )


def first_in_norm(traces: Traces, step: int) -> FirstWrong | None:
    """A norm that is wrong on any rank."""
    right, within = traces.one.steps[step], traces.within(step)
    wrong = [trace for trace in traces.ranks if not _same_number(trace.steps[step].norm, right.norm, within)]
    if not wrong:
        return None
    ours, cause = wrong[0].steps[step].norm, ""
    if ours is None or right.norm is None:
        found = Discrepancy("shape", text=f"{ours} instead of {right.norm}")
    else:
        found = describe(torch.tensor(ours).double(), torch.tensor(right.norm).double())
        cause = "the same squares, added in another order"
        if found.max_rel > 1e-5:
            cause = cause_of_norm(ours, right.norm, [_squares(trace, right) for trace in traces.ranks])
    ranks = tuple(trace.rank for trace in wrong)
    return FirstWrong(step, "norm", "", ranks, len(traces.ranks), found, (), "every sum of the gradients", 0, cause)


def first_clipped(traces: Traces, step: int) -> FirstWrong | None:
    """The first gradient that is wrong as the optimizer is given it."""
    wrong = _wrong_pieces(traces, step, "clipped")
    after = "the norm" if traces.config.clip is not None else "every sum of the gradients"
    return _told(traces, step, "clip", wrong, after, "") if wrong else None


def first_updated(traces: Traces, step: int) -> FirstWrong | None:
    """The first parameter whose owner gives it a wrong value."""
    wrong = _wrong_pieces(traces, step, "updated", moved=True)
    if not wrong:
        return None
    first, cause = wrong[0], "no rank owns it"
    if first.piece is not None:
        trace = traces.of(first.rank)
        old = same_run(trace, traces.before(step, first.name), first.piece)
        new = same_run(trace, traces.one.steps[step].updated[first.name], first.piece)
        cause = cause_of_update(describe(trace.steps[step].updated[first.piece] - old, new - old))
    return _told(traces, step, "update", wrong, "every clipped gradient", cause)


def first_published(traces: Traces) -> FirstWrong | None:
    """The first parameter that a rank has wrong after the last of the steps."""
    step = max(traces.one.steps)
    wrong = []
    for trace in traces.ranks:
        for name, value in trace.published.items():
            if name not in traces.rounding and (right := traces.one.final.get(name)) is not None:
                found = describe(value.cpu(), right.to(value.dtype), traces.within(step, moved=True))
                if found.pattern != "equal":
                    wrong.append(Wrong(0, trace.rank, name, found))
    if not wrong:
        return None
    first = wrong[0]
    ours, old = traces.of(first.rank).published[first.name].cpu(), traces.before(step, first.name)
    stale, at_rest = torch.equal(ours, old.to(ours.dtype)), bool(ours.isnan().all())
    cause = cause_of_parameter(first.discrepancy.pattern, stale=stale, at_rest=at_rest)
    return _told(traces, step, "publish", wrong, "every update", cause)


def _wrong_pieces(traces: Traces, step: int, which: str, *, moved: bool = False) -> list[Wrong]:
    """What the ranks have of some tensors of a step that is wrong, in the order of a backward; what none has, too."""
    right: dict[str, Tensor] = getattr(traces.one.steps[step], which)
    contributed = [mark.name for mark in traces.one.steps[step].marks if mark.event == "contribution"]
    place = {name: i for i, name in enumerate(dict.fromkeys([*contributed, *right]))}
    wrong, seen, within = [], set[str](), traces.within(step, moved=moved)
    for trace in traces.ranks:
        for piece, ours in getattr(trace.steps[step], which).items():
            seen.add(piece[0])
            if piece[0] in traces.rounding:
                continue
            theirs = right.get(piece[0])
            expected = torch.zeros(0) if theirs is None else same_run(trace, theirs, piece)
            found = describe(ours, expected, within)
            if found.pattern != "equal":
                wrong.append(Wrong(place.get(piece[0], 0), trace.rank, piece[0], found, piece=piece))
    gone = Discrepancy("nothing", text="no rank has it")
    wrong += [Wrong(place[name], -1, name, gone) for name in right.keys() - seen]
    return sorted(wrong, key=lambda w: w.order)


def _told(
    traces: Traces, step: int, phase: Phase, wrong: Sequence[Wrong], after: str, cause: str
) -> FirstWrong:  # fmt: skip
    first = wrong[0]
    ranks = tuple(dict.fromkeys(w.rank for w in wrong if w.name == first.name and w.rank >= 0))
    others = len({w.name for w in wrong} - {first.name})
    return FirstWrong(step, phase, first.name, ranks, len(traces.ranks), first.discrepancy, (), after, others, cause)


# ---- causes -----------------------------------------------------------------------------------------------------


def _cause_of_sum(traces: Traces, wrong: Sequence[Wrong], step: int) -> str:
    """What a gradient holds instead of every microbatch's contribution once, in words."""
    first = wrong[0]
    if first.piece is None:
        return "no rank owns it, or none was given its gradient"
    trace, right, before = traces.of(first.rank), traces.one.steps[step], traces.one.steps.get(step - 1)
    if others := [k for use in traces.ties.get(first.name, ()) for k in use if k != first.name]:
        return _cause_of_tied_sum(trace, right, first.piece, [first.name, *others], step)
    mine = [w.piece for w in wrong if w.rank == first.rank and w.piece]
    ways = groupings(traces.config.parsed_mesh.data_size, traces.config.microbatches)
    for pieces in (mine, mine[:1]):  # those of several parameters tell more, if the same happened to all
        parts = [[_contribution(trace, right, m, p[0], p) for p in pieces] for m in right.counts]
        last = [same_run(trace, before.summed[p[0]], p) for p in pieces] if before else None
        ours = [trace.steps[step].summed[p] for p in pieces]
        if told := cause_of_sum(ours, parts, list(right.counts.values()), ways, last):
            return told
    return ""


def _cause_of_tied_sum(trace: RankTrace, right: TracedStep, piece: Piece, keys: Sequence[str], step: int) -> str:
    """Which uses of a weight are in its gradient, in words."""
    uses = [[sum(_contribution(trace, right, m, key, piece) for m in right.counts)] for key in keys]
    found = contributions([trace.steps[step].summed[piece]], uses)  # type: ignore[arg-type]
    if not found.determined or found.rest > 1e-4:
        return ""
    return explain(found, names=[f"its use as {key!r}" for key in keys]) or "the right terms, added in another order"


def _contribution(trace: RankTrace, right: TracedStep, microbatch: int, key: str, piece: Piece) -> Tensor:
    part = right.marks.get(Mark(microbatch, "contribution", key))
    if part is None:
        return torch.zeros(piece[2] - piece[1], dtype=torch.float64)
    return same_run(trace, part, piece) / right.scale


def _squares(trace: RankTrace, right: TracedStep) -> float:
    """The sum of the squares of what a rank owns, as the single process has it."""
    pieces = [same_run(trace, right.summed[p[0]], p) for p in trace.norm_pieces if p[0] in right.summed]
    return float(sum(wide(piece).square().sum().item() for piece in pieces))


def _same_number(ours: float | None, right: float | None, within: float) -> bool:
    if ours is None or right is None:
        return ours is right
    return ours == right or abs(ours - right) <= within * abs(right)
