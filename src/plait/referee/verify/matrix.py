"""``plait verify --matrix``: many layouts in this process; a grid of verdicts, an exit code.

    cases.py ──► configs ──► each: thread ranks, both references, judge ──► outcome ──► grid, failures, JSON

A cell fails if its verdict is not the one that is due (*equal* fails where the same bits are due) or if anything
raises.  A failure does not end the matrix; it is printed at once, with the command that runs that cell alone.

Layouts of one job share a reference if it is the same run: the same data axes, microbatches, order of additions, runs
of the norm and uses of tied weights.  The reference knows nothing else of a layout; dtypes (those of a row included),
the loss scale and the gemm belong to the job.
"""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.checkpoint.files.writing import write_json
from plait.comm import thread
from plait.referee.verify.cases import cells, cells_of_job, command, due
from plait.referee.verify.observed import Record
from plait.referee.verify.plain import run_plain
from plait.referee.verify.record import record_run
from plait.referee.verify.reference import run_reference
from plait.referee.verify.run import Verdict, judge, line_of, replay
from plait.run.config import VerifyConfig, validate, with_job
from plait.run.job.config import JobConfig
from plait.run.job.job import Job, make_job
from plait.run.job.sections import flags
from plait.run.report.screen import screen
from plait.schedule.orders import ORDERS
from plait.table.cells import TABLE
from plait.table.mesh import Mesh
from plait.table.precision import Precision

MARKS = {"bitwise": "b", "equal": "e", "DIFFERENT": "D", "error": "X"}
"""The verdicts of a cell, and their letters in the grid."""

OF_THE_MATRIX = ("config", "plugin", "matrix", "job", "data", "seed", "deadline", "json")
"""What may be given with ``matrix``, which chooses everything else."""

REMEMBERED = 64  # references, of about a megabyte each
TOLD = 3  # findings that are printed for a failing cell
WIDTH = 100  # columns that the grid needs at least
EVERY = 20.0  # seconds between two lines of progress


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: ``word`` is bitwise, equal, DIFFERENT or error; ``told`` are lines that say where."""

    config: VerifyConfig
    word: str
    seconds: float
    told: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.word not in ("bitwise", due(self.config))


class References:
    """Jobs and reference runs, each made once for the cells that share it."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[JobConfig, Precision], Job] = {}
        self._records: dict[str, Record] = {}

    def job(self, config: VerifyConfig) -> Job:
        """The job that a config describes."""
        key = config.task, config.dtypes.precision
        if key not in self._jobs:
            self._jobs[key] = make_job(config.task, config.dtypes)
        return self._jobs[key]

    def run(self, job: Job, mesh: Mesh, num_microbatches: int, *rest: Any, **settings: Any) -> Record:
        """``run_reference``, or what it gave for the same arguments."""
        key = repr((id(job), mesh.replica, mesh.shard, num_microbatches, rest, sorted(settings.items())))
        return self._remembered(key, lambda: run_reference(job, mesh, num_microbatches, *rest, **settings))

    def plain(self, job: Job, config: VerifyConfig) -> Record:
        """``run_plain``, or what it gave for the same job and clip."""
        return self._remembered(f"plain {id(job)} {config.task.update.clip}", lambda: run_plain(job, config.task))

    def _remembered(self, key: str, run: Callable[[], Record]) -> Record:
        if key not in self._records:
            if len(self._records) >= REMEMBERED:
                self._records.pop(next(iter(self._records)))
            self._records[key] = run()
        return self._records[key]


def run_matrix(config: VerifyConfig) -> int:
    """Run the config's matrix and print the grid: the exit code, 0 if all is as due; ValueError for other flags."""
    assert config.comparison.matrix is not None
    unsaid = flags(VerifyConfig())
    for name, value in flags(config).items():
        if name not in OF_THE_MATRIX and value != unsaid[name]:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} with --matrix, which chooses its layouts itself: leave one of them out")
    chosen = (
        cells(config.comparison.matrix)
        if config.task.network.job is None
        else cells_of_job(config.with_flags(matrix=None), config.comparison.matrix)
    )
    configs = [
        c.with_flags(data=config.task.samples.data, seed=config.task.samples.seed, deadline=config.machine.deadline)
        for c in chosen
    ]
    console = screen(soft_wrap=True, stderr=config.files.json == "-")
    console.width = max(console.width, WIDTH)
    started = time.monotonic()
    outcomes = run_cells(configs, console)
    seconds = time.monotonic() - started
    if config.files.json:
        write_json(config.files.json, report(config.comparison.matrix, outcomes, seconds))
    show(outcomes, seconds, console)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def run_cells(configs: Sequence[VerifyConfig], console: Console) -> list[Outcome]:
    """The outcome of each config, in order; failures and progress are printed as they come."""
    outcomes: list[Outcome] = []
    made_once = References()
    started = told = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for config in configs:
            outcomes.append(outcome_of(config, made_once))
            if outcomes[-1].failed:
                tell(outcomes[-1], console)
            now, done = time.monotonic(), len(outcomes)
            if now - told > EVERY:
                told, left = now, (now - started) / done * (len(configs) - done)
                failed = sum(outcome.failed for outcome in outcomes)
                console.print(f"{done} of {len(configs)} cells, {failed} failed, about {left / 60:.1f} min left")
    finally:
        torch.set_num_threads(threads)
    return outcomes


def outcome_of(config: VerifyConfig, made_once: References) -> Outcome:
    """Run one cell; whatever it raises is its outcome."""
    started = time.monotonic()
    try:
        verdict = verdict_of(config, made_once)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        told = (f"{type(error).__name__}: {error}", f"in {last.name}, {last.filename}:{last.lineno}")
        return Outcome(config, "error", time.monotonic() - started, told)
    word = verdict.word if verdict.equal else "DIFFERENT"
    outcome = Outcome(config, word, time.monotonic() - started)
    return replace(outcome, told=_where(verdict)) if outcome.failed else outcome


def verdict_of(config: VerifyConfig, made_once: References) -> Verdict:
    """Record a layout on thread ranks and compare it with its references."""
    config = with_job(config)
    validate(config)
    job = made_once.job(config)
    ranks = thread.run(
        config.machine.parsed_mesh, lambda comm: record_run(job, config, comm), deadline=config.machine.deadline
    )
    return judge(job, config, ranks, replay(job, config, ranks, made_once.run), made_once.plain(job, config))


def _where(verdict: Verdict) -> tuple[str, ...]:
    """The findings that failed, or were not bitwise, and the first messages that were not predicted."""
    unequal = [f for f in (*verdict.tree, *verdict.plain) if not f.equal]
    wrong = unequal or [f for f in verdict.tree if not f.bitwise]
    lines = [line_of(finding).strip() for finding in wrong[:TOLD]]
    if len(wrong) > TOLD:
        lines.append(f"and {len(wrong) - TOLD} more findings")
    if verdict.ledger:
        lines += [f"ledger: {len(verdict.ledger)} messages differ from the prediction", *verdict.ledger[:TOLD]]
    return tuple(lines)


def show(outcomes: Sequence[Outcome], seconds: float, console: Console) -> None:
    """The grids, the failing cells, and a last line."""
    orders = [None, *ORDERS]
    console.print(
        grid("schedule", outcomes, lambda c: (orders.index(c.layout.schedule), c.layout.schedule or "one stage"))
    )
    console.print(grid("mesh", outcomes, lambda c: (c.machine.parsed_mesh.size, c.machine.mesh)))
    console.print("b bitwise, e equal within rounding (due with a tensor axis), D different, X error; ! is not as due")
    failed = [outcome for outcome in outcomes if outcome.failed]
    for outcome in failed:
        tell(outcome, console)
        for line in outcome.told:
            console.print(f"    {line}")
    words = Counter(outcome.word for outcome in outcomes)
    end = (f"{len(failed)} failed", "bold red") if failed else ("all as due", "bold green")
    counts = ", ".join(f"{number} {word}" for word, number in words.items())
    console.print(Text.assemble(f"{len(outcomes)} cells in {seconds / 60:.1f} min: {counts}; ", end))


def tell(outcome: Outcome, console: Console) -> None:
    """A failing cell: its verdict and the command that runs it alone."""
    console.print(Text.assemble((outcome.word, "bold red"), f", {due(outcome.config)} is due: "), end="")
    console.print(command(outcome.config))


def grid(title: str, outcomes: Sequence[Outcome], line: Callable[[VerifyConfig], tuple[int, str]]) -> Table:
    """How many cells have which verdict: a column for each strategy, lines by place and name."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in (title, *TABLE):
        table.add_column(heading, no_wrap=True)
    for key in sorted({line(outcome.config) for outcome in outcomes}):
        here = [outcome for outcome in outcomes if line(outcome.config) == key]
        table.add_row(key[1], *(_marks([o for o in here if o.config.layout.strategy == row]) for row in TABLE))
    return table


def _marks(outcomes: Sequence[Outcome]) -> Text:
    """``2b 1e``, and in red ``1D!``."""
    counts = sorted(Counter((outcome.failed, MARKS[outcome.word]) for outcome in outcomes).items())
    return Text(" ").join(Text(f"{n}{mark}!", "bold red") if bad else Text(f"{n}{mark}") for (bad, mark), n in counts)


def report(size: str, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The outcomes as plain data."""
    return {
        "matrix": size,
        "seconds": round(seconds, 1),
        "failed": sum(outcome.failed for outcome in outcomes),
        "cells": [
            {
                "command": command(outcome.config),
                "verdict": outcome.word,
                "due": due(outcome.config),
                "seconds": round(outcome.seconds, 2),
                "told": outcome.told,
            }
            for outcome in outcomes
        ],
    }
