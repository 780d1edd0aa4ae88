"""The report of a plan: its bytes and seconds by the planner's count, and its neighbours.

report     name, kind, notes      its title, "plan" or "run", lines of text
           numbers                [name, predicted, measured, unit], for comparing two reports
           layout, memory, messages, seconds, timelines, curves      drawn if they exist
           limit, change          the part that takes longest, and the one change that the planner would make
           others, explorer       layouts that lose, and tables for the sliders
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.predict.footprint import footprints
from plait.predict.plan import Plan
from plait.predict.search import Candidate, faster_change, room, smallest_change
from plait.predict.sent import SentMessages, messages
from plait.run.report.page.lanes import planned_lanes
from plait.run.report.page.layout import layout_facts
from plait.run.report.plans import described, link_of, loses
from plait.table.cells import Strategy

MOST_RANKS = 32
"""The largest number of ranks of the pipe axis whose bytes are on the page: the first ones."""

NOTES = (
    "All seconds are predicted. Between libraries the constants differ by up to a quarter.",
    "MFU counts attention in full, as if it were not causal.",
    "A row's gathers and reductions in a pipeline of several stages a rank are counted at their most: each stage is "
    "gathered in turn.",
)
"""Lines about the numbers of a plan."""


def plan_report(found: Sequence[Candidate], rows: Sequence[Strategy], name: str, top: int = 10) -> dict[str, Any]:
    """Reports the first of some ranked candidates.  ``rows`` are those of the table that a change may choose."""
    best, plan, part = found[0], found[0].plan, found[0].duration
    return {
        "kind": "plan",
        "name": name,
        "notes": [
            f"{plan.model.num_parameters:,} parameters on {described(plan.cluster)}; {plan.batch:,} samples of "
            f"{plan.length:,} tokens a step; {settings_text(plan)}",
            *NOTES,
        ],
        "numbers": numbers(best),
        "layout": layout_facts(plan.mesh, plan.strategy),
        "memory": memory_facts(plan),
        "messages": [message_facts(plan, sent) for sent in messages(plan, plan.shares[best.fullest.pipe])],
        "seconds": [[name, seconds, None] for name, seconds in vars(part).items()],
        "timelines": {"simulated": planned_lanes(plan)},
        "limit": f"{part.bound}: {getattr(part, part.bound):.3g} s of {part.total:.3g} s a step",
        "change": change_text(best, rows),
        "others": [other(one, best) for one in found[:top]],
    }


def settings_text(plan: Plan) -> str:
    words = [f"mesh {plan.mesh}", plan.strategy.name, f"{plan.microbatches} x {plan.samples} samples a data rank"]
    return ", ".join(filter(None, (*words, plan.order, plan.recompute and f"recompute {plan.recompute}")))


def numbers(best: Candidate) -> list[list[Any]]:
    """The figures by which reports are compared: name, predicted, measured, unit."""
    plan = best.plan
    sent = sum(one.bytes for one in messages(plan, plan.shares[best.fullest.pipe]))
    return [
        ["seconds a step", best.duration.total, None, "s"],
        ["tokens per second", best.tokens, None, "1/s"],
        ["MFU", 100 * best.mfu, None, "%"],
        ["bytes of the fullest rank", best.fullest.total, None, "B"],
        ["bytes it sends in a step", sent, None, "B"],
        ["bubble", 100 * best.duration.bubble / best.duration.total, None, "%"],
    ]


def memory_facts(plan: Plan) -> dict[str, Any]:
    """Bytes of the ranks of one pipeline by kind, as [kind, predicted, measured]."""
    ranks = [
        {"rank": plan.mesh.rank(pipe=one.pipe), "kinds": [[kind, size, None] for kind, size in one.kinds.items()]}
        for one in footprints(plan)[:MOST_RANKS]
    ]
    return {"capacity": room(plan), "ranks": ranks}


def message_facts(plan: Plan, sent: SentMessages) -> dict[str, Any]:
    axes, link = link_of(plan.mesh, sent.axes)
    line = {"phase": sent.phase, "kind": sent.kind, "axes": axes, "link": link, "times": sent.times}
    return line | {"predicted": sent.bytes, "measured": None, "seconds": sent.seconds}


def change_text(best: Candidate, rows: Sequence[Strategy]) -> str:
    """The one change of the layout that the planner would make, in words."""
    found = faster_change(best.plan, rows) if best.fits else smallest_change(best.plan, rows)
    if found is None and best.fits:
        return "none: no single change of its settings is faster and fits"
    if found is None:
        return "none: no one or two changes of its settings make it fit; use more devices"
    words, one = found
    if best.fits:
        return f"{words}: {one.duration.total:.3g} s a step instead of {best.duration.total:.3g} s"
    return f"{words}: then it fits, with {one.fullest.total / 1e9:.3g} GB and {one.duration.total:.3g} s a step"


def other(one: Candidate, best: Candidate) -> dict[str, Any]:
    plan = one.plan
    return {
        "mesh": str(plan.mesh),
        "row": plan.strategy.name,
        "order": plan.order or "",
        "microbatches": plan.microbatches,
        "recompute": plan.recompute or "",
        "seconds": one.duration.total,
        "mfu": 100 * one.mfu,
        "bytes": one.fullest.total,
        "fits": one.fits,
        "loses": loses(one, best),
    }
