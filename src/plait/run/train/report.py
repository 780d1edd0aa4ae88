"""Writes report.html of a finished run: its measurements, and the planner's predictions for the same run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from plait.checkpoint.files.reading import read_text
from plait.checkpoint.files.writing import write_text
from plait.predict.cluster import parse_cluster
from plait.predict.plan import Plan, implementation
from plait.predict.search import Candidate
from plait.run.config.layout import LayoutConfig
from plait.run.config.machine import MachineConfig
from plait.run.config.sinks import METRICS
from plait.run.job.config import JobConfig
from plait.run.job.outline import counted
from plait.run.report.page.saved import REPORT, page
from plait.run.report.page.trained import FinishedRun, Totals, trained_report
from plait.table.cells import Strategy
from plait.table.collectives import Entry

LARGEST = 1 << 28
"""The largest file of metrics that is drawn, in bytes."""


def totals(entries: Iterable[Entry], without: Sequence[str] = ()) -> Totals:
    """Adds up messages by phase, kind and axes, without some phases."""
    found: dict[tuple[str, str, tuple[str, ...]], tuple[int, int]] = {}
    for entry in entries:
        if entry.note.phase not in without:
            times, size = found.get(key := (entry.note.phase, entry.kind, entry.axes), (0, 0))
            found[key] = times + 1, size + entry.sent
    return found


def write_report(folder: Path, run: FinishedRun) -> None:
    """Writes the report into the run's folder, with the curves of its metrics."""
    lines = [json.loads(line) for line in read_text(folder / METRICS, "the metrics", LARGEST).splitlines()]
    needed = {"step", "loss", "tokens", "seconds", "peak_memory"}  # the lines of steps that were made
    run = run._replace(lines=[line for line in lines if needed <= line.keys() and line["seconds"]])
    write_text(folder / REPORT, page([trained_report(run)]))


def plan_of(
    task: JobConfig, layout: LayoutConfig, machine: MachineConfig, row: Strategy, file: str | None
) -> Plan | None:
    """The run as the planner sees it; None if it does not know the model or the cluster, which a file describes, or
    batches are ragged."""
    if file is None:
        return None
    mesh, cluster = machine.parsed_mesh, parse_cluster(read_text(file, "the cluster"), file)
    with suppress(ValueError):  # uneven batches, a schedule written by hand, a dtype without a peak, a job off meta
        model, batch, length = counted(task)
        if model is None:
            return None
        plan = Plan(
            model,
            replace(cluster, hosts=mesh.hosts, devices=mesh.size // mesh.hosts),
            *(mesh, row, batch, length),
            *(layout.microbatches, layout.schedule, layout.chunks),
            recompute=layout.recompute,
            sequence_parallel=layout.sequence_parallel,
            all_to_all=layout.all_to_all,
            dtype=row.params.dtype or task.network.dtype.partition("-")[0],
            states=task.optimizer_row.states,
            **implementation(model, cluster),
        )
        Candidate.of(plan)  # raises if it cannot count the plan
        return plan
    return None
