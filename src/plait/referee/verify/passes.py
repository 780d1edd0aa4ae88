"""The first wrong tensor of the forwards and backwards of a step.

Microbatches do not depend on each other within a step, so of several the one counts that is wrong soonest after its
beginning.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from plait.referee.contributions import Contributions, explain, groupings
from plait.referee.difference import describe
from plait.referee.tape import Event, Mark
from plait.referee.values import wide
from plait.referee.verify.compare import same_run
from plait.referee.verify.traced import RankTrace, TracedStep
from plait.referee.verify.traces import Traces, Wrong
from plait.referee.wrong import FirstWrong, Phase, cause_of_parameter, said

PHASES: Mapping[str, Phase] = {
    "parameter": "parameter",
    "output": "forward",
    "loss": "loss",
    "gradient": "backward",
    "contribution": "contribution",
}

Order = Mapping[tuple[Event, str, int], int]
"""The place of each event, name and call in the run of one microbatch."""


def first_in_passes(traces: Traces, step: int) -> FirstWrong | None:
    """The earliest difference in the microbatches of a step."""
    order = order_of(traces.one.steps[step])
    wrong = [w for trace in traces.ranks for w in wrong_marks(traces, trace, step, order)]
    if not wrong:
        return None
    first = min(wrong, key=lambda w: w.order)
    same = [w for w in wrong if w.order == first.order]
    phase = _phase(first)
    others = {w.name for w in wrong if _phase(w) == phase} - {first.name}
    reads = phase == "parameter"
    before = [Mark(0, event, name, call) for (event, name, call), i in order.items() if i < first.order]
    after = before[-1] if before else None
    return FirstWrong(
        step,
        "initial values" if reads and step == 0 else phase,
        first.name,
        tuple(dict.fromkeys(w.rank for w in same)),
        len(traces.ranks),
        first.discrepancy,
        () if reads else tuple(sorted({w.mark.microbatch for w in same if w.mark})),
        said(PHASES[after.event], after.name) if after else "",
        len(others),
        _cause(traces, phase, same, step, after_loss=after is not None and after.event == "loss"),
    )


def order_of(right: TracedStep) -> Order:
    """The place of each event in the run of one microbatch, as the single process had it; the loss lies between."""
    first = [mark for mark in right.marks if mark.event in ("parameter", "output")]
    second = [mark for mark in right.marks if mark.event in ("gradient", "contribution")]
    return {event: i for i, event in enumerate(dict.fromkeys(m[1:] for m in (*first, Mark(0, "loss", ""), *second)))}


def wrong_marks(traces: Traces, trace: RankTrace, step: int, order: Order) -> Iterator[Wrong]:
    """Everything on a rank's tape of a step, and its losses, that is not as in the single process."""
    ours, right, within = trace.steps[step], traces.one.steps[step], traces.within(step)
    for mark, value in ours.marks.items():
        theirs = right.marks.get(mark)
        if theirs is None or traces.equal_in_sum(mark, step, theirs):
            continue
        if mark.event == "contribution" and mark.name in traces.rounding:
            continue
        if mark.event == "parameter" and value.isnan().all():
            continue  # at rest: whether it is read shows in what is made of it
        found = traces.compared(trace, mark, value, theirs, within)
        if found is not None and found.pattern != "equal":
            yield Wrong(order[mark[1:]], trace.rank, mark.name, found, mark)
    for microbatch, loss in ours.losses.items():
        mark = Mark(microbatch, "loss", "")
        found = describe(_number(loss), _number(right.losses[microbatch]), within)
        if found.pattern != "equal":
            yield Wrong(order[mark[1:]], trace.rank, "", found, mark)


def _phase(wrong: Wrong) -> Phase:
    assert wrong.mark is not None
    return PHASES[wrong.mark.event]


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# ---- causes -----------------------------------------------------------------------------------------------------


def _cause(traces: Traces, phase: Phase, same: Sequence[Wrong], step: int, *, after_loss: bool) -> str:
    first = same[0]
    if phase == "parameter":
        before = traces.one.steps.get(step - 1)
        stale = before is not None and _is_another(traces, first, step, before, same=True) is not None
        pattern = "permutation" if _known_values(traces, first, step) else first.discrepancy.pattern
        return cause_of_parameter(pattern, stale=stale, at_rest=False)
    if first.discrepancy.pattern == "not finite":
        return "a parameter may be read while its values are elsewhere"
    if (other := _is_another(traces, first, step, traces.one.steps[step])) is not None:
        return f"it is that of microbatch {other}"
    if phase == "backward" and after_loss and (scaled := _scaled(traces, same, step)):
        return f"the loss is scaled wrongly: {scaled}"
    if phase == "backward" and first.discrepancy.pattern == "nothing":
        return "no gradient comes back to it"
    if phase == "forward":
        return (
            "its inputs and parameters are right: it computes something else (another mask or position, a missing sum)"
        )
    return ""


def _scaled(traces: Traces, same: Sequence[Wrong], step: int) -> str:
    """Which factors the microbatches' gradients have, in words, where they have one."""
    if not all(w.discrepancy.pattern in ("factor", "nothing") for w in same):
        return ""
    factors = {w.mark.microbatch: w.discrepancy.factor or 0.0 for w in same if w.mark}
    counts = traces.one.steps[step].counts
    grouping = groupings(traces.config.parsed_mesh.data_size, traces.config.microbatches)[-1]
    names = grouping.names if len(grouping.names) == len(counts) else None
    found = Contributions(tuple(factors.get(m, 1.0) for m in counts), 0.0, True)
    return explain(found, list(counts.values()), names)


def _is_another(traces: Traces, wrong: Wrong, step: int, where: TracedStep, *, same: bool = False) -> int | None:
    """The microbatch of which a value is, other than its own; ``same``: of any, in another step."""
    assert wrong.mark is not None
    trace = traces.of(wrong.rank)
    if wrong.mark.event == "loss":
        ours = trace.steps[step].losses[wrong.mark.microbatch]
        return next((m for m, loss in where.losses.items() if loss == ours and m != wrong.mark.microbatch), None)
    value = trace.steps[step].marks[wrong.mark]
    for mark, theirs in where.marks.items() if value.any() else ():
        if mark[1:] == wrong.mark[1:] and (same or mark.microbatch != wrong.mark.microbatch):
            found = traces.compared(trace, mark, value, theirs, traces.within(step))
            if found is not None and found.pattern == "equal":
                return mark.microbatch
    return None


def _known_values(traces: Traces, wrong: Wrong, step: int) -> bool:
    """Whether most wrong elements of a parameter are right values of other places."""
    assert wrong.mark is not None
    trace, marks = traces.of(wrong.rank), traces.one.steps[step].marks
    ours = trace.steps[step].marks[wrong.mark].reshape(-1)
    right = torch.cat([wide(v).reshape(-1) for mark, v in marks.items() if mark.event == "parameter"])
    theirs = same_run(trace, marks[wrong.mark], (wrong.name, 0, len(ours)))
    odd = wide(ours[(ours != theirs) & (ours != 0)]).reshape(-1)
    return len(odd) > 0 and bool(torch.isin(odd, right).float().mean() > 0.5)
