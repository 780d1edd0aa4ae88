"""The report of a training run: its curves, and its bytes and seconds, measured and predicted.

Its keys are those of ``planned.py``.  If its cluster is known, it has the planner's view of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from plait.predict.plan import Plan
from plait.predict.search import Candidate
from plait.run.report.idle import CAUSES, idle_times, mean_idle
from plait.run.report.page.lanes import measured_lanes, timeline_lanes
from plait.run.report.page.layout import layout_facts
from plait.run.report.page.planned import NOTES, change_text
from plait.run.report.plans import link_of
from plait.run.report.training import RankBytes
from plait.schedule.actions import Log
from plait.schedule.simulate import Timeline
from plait.table.cells import Strategy
from plait.table.mesh import Mesh

Totals = Mapping[tuple[str, str, tuple[str, ...]], tuple[int, int]]
"""Number and bytes of a rank's messages, by phase, kind and axes."""

MOST_POINTS = 1500
"""The largest number of points in a curve; a longer run has every n-th step drawn."""
MOST_RANKS = 32
UNCALIBRATED = "unknown: plait doctor --calibrate FILE describes this machine, and --cluster FILE reads it"


class FinishedRun(NamedTuple):
    """The numbers of a run that the report shows."""

    name: str
    notes: Sequence[str]
    mesh: Mesh
    row: Strategy
    unit: str
    ranks: Sequence[RankBytes]
    activations: int | None
    """Predicted bytes that a microbatch keeps on rank 0; None for a model that is not described."""
    predicted: Totals
    measured: Totals
    """Messages of rank 0 in a step; empty if there were too many to list."""
    log: Log
    simulated: Timeline
    plan: Plan | None
    """The run as the planner sees it; None if its cluster or its model is not described."""
    rows: Sequence[Strategy]
    """The rows among which the planner looks for a change."""
    lines: Sequence[Mapping[str, Any]] = ()
    """One line for each step, as in metrics.jsonl."""


def trained_report(run: FinishedRun) -> dict[str, Any]:
    best = None if run.plan is None else Candidate.of(run.plan)
    causes = {CAUSES[name]: seconds for name, seconds in mean_idle(idle_times(run.log)).parts.items()}
    planned = {} if best is None else vars(best.duration)
    return {
        "kind": "run",
        "name": run.name,
        "notes": [*run.notes, *(NOTES[1:2] if best else ())],
        "numbers": _numbers(run, best),
        "layout": layout_facts(run.mesh, run.row),
        "memory": _memory(run),
        "messages": _messages(run),
        "seconds": [[name, part, None] for name, part in planned.items()]
        + [[name, None, seconds] for name, seconds in causes.items()],
        "timelines": {"simulated": timeline_lanes(run.simulated), "measured": measured_lanes(run.log)},
        "curves": _curves(run),
        "limit": _limit(causes),
        "change": change_text(best, run.rows) if best else UNCALIBRATED,
    }


def _numbers(run: FinishedRun, best: Candidate | None) -> list[list[Any]]:
    """Figures of the run: medians over its steps; bytes of rank 0."""
    took = median(line["seconds"] for line in run.lines)
    rate = median(line["tokens"] / line["seconds"] for line in run.lines)
    rank, losses = run.ranks[0], [line["loss"] for line in run.lines if line.get("loss") is not None]
    found: list[list[Any]] = [
        ["last loss", None, losses[-1] if losses else None, ""],
        ["seconds a step", best.duration.total if best else None, took, "s"],
        [f"{run.unit} per second", best.tokens if best else None, rate, "1/s"],
        ["bytes held between steps", rank.predicted.total, rank.measured.total, "B"],
        ["bytes sent in a step", rank.sent_predicted, rank.sent_measured, "B"],
        ["peak memory", None, max(line["peak_memory"] for line in run.lines), "B"],
    ]
    if rank.crossing_predicted or rank.crossing_measured:
        found.append(["of that between hosts", rank.crossing_predicted, rank.crossing_measured, "B"])
    if best is not None:
        found.insert(3, ["MFU", 100 * best.mfu, 100 * best.mfu * best.duration.total / took, "%"])
    return found


def _curves(run: FinishedRun) -> dict[str, Any]:
    every = -(-len(run.lines) // MOST_POINTS)
    lines = [line for i, line in enumerate(run.lines) if i % every == 0 or i + 1 == len(run.lines)]
    values: dict[str, list[Any]] = {
        "loss": [line["loss"] for line in lines],
        "held-out loss": [line.get("eval_loss") for line in lines],
        f"{run.unit} per second": [line["tokens"] / line["seconds"] for line in lines],
        "gradient norm": [line.get("grad_norm") for line in lines],
        "learning rate": [line.get("lr") for line in lines],
    }
    if run.plan is not None:
        plan = run.plan
        flops = plan.model.flops(plan.length) / (plan.cluster.size * plan.cluster.peak(plan.dtype))
        values["MFU, %"] = [100 * flops * line["tokens"] / line["seconds"] for line in lines]
    drawn = {name: found for name, found in values.items() if any(one is not None for one in found)}
    return {"steps": [line["step"] for line in lines], "values": drawn}


def _memory(run: FinishedRun) -> dict[str, Any]:
    """Bytes of each rank by kind, as [kind, predicted, measured]; None if there is no such number."""
    ranks = []
    for one in run.ranks[:MOST_RANKS]:
        kinds: list[list[Any]] = [
            [name, said, getattr(one.measured, name)] for name, said in vars(one.predicted).items()
        ]
        if one.gathered_peak:
            kinds.append(["gathered at most (measured)", None, one.gathered_peak])
        if not one.rank and run.activations is not None:
            kinds.append(["activations of a microbatch (predicted)", run.activations, None])
        ranks.append({"rank": one.rank, "kinds": kinds})
    return {"capacity": None, "ranks": ranks}


def _messages(run: FinishedRun) -> list[dict[str, Any]]:
    found = []
    for phase, kind, over in dict.fromkeys((*run.predicted, *run.measured)):
        times, size = run.predicted.get((phase, kind, over), (0, 0))
        sent, measured = run.measured.get((phase, kind, over), (0, 0))
        axes, link = link_of(run.mesh, over)
        line = {"phase": phase, "kind": kind, "axes": axes, "link": link, "times": times or sent}
        found.append(line | {"predicted": size, "measured": measured if run.measured else None, "seconds": None})
    return found


def _limit(causes: Mapping[str, float]) -> str:
    """The largest cause of the time in which ranks do not compute, in words."""
    whole = sum(causes.values()) or 1.0
    busy = causes[CAUSES["busy"]] / whole
    name = max((one for one in causes if one != CAUSES["busy"]), key=lambda one: causes[one])
    return f"ranks compute {busy:.0%} of the step; the largest other part is {name}, {causes[name] / whole:.0%}"
