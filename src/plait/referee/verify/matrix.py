"""``plait verify --matrix``: many layouts in this process, a line for each that fails, an exit code.

A cell fails if its verdict is not the required one (*equal* fails if the same bits are required) or if anything
raises.  A failure does not end the matrix.
"""

import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from plait.checkpoint.files.writing import write_json
from plait.messages.progress import counted, shown_by
from plait.referee.verify.cases import cells, cells_of_job, command, due
from plait.referee.verify.kernels import repeatable
from plait.referee.verify.record import in_threads
from plait.referee.verify.run import Verdict, judge, line_of, references
from plait.run.config.check import validate
from plait.run.config.machine import resolve_device
from plait.run.config.settings import VerifyConfig, with_job
from plait.run.job.job import make_job
from plait.run.job.sections import flags
from plait.run.report.screen import screen, working

OF_THE_MATRIX = ("config", "plugin", "matrix", "job", "data", "seed", "deadline", "device", "json")
"""The fields that may be given with ``matrix``, which chooses everything else."""
TOLD = 3  # findings that are printed for a failing cell


@dataclass(frozen=True)
class Outcome:
    """A cell's verdict (bitwise, equal, DIFFERENT or error), and lines that say where it is wrong."""

    config: VerifyConfig
    word: str
    told: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.word not in ("bitwise", due(self.config))

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"command": command(self.config), "verdict": self.word, "due": due(self.config), "told": self.told}


def run_matrix(config: VerifyConfig) -> int:
    """Runs the config's matrix; returns the exit code, 0 if no cell fails.  Raises ValueError for other flags."""
    size, given, unsaid = config.comparison.matrix, flags(config), flags(VerifyConfig())
    assert size is not None
    for name, value in given.items():
        if name not in OF_THE_MATRIX and value != unsaid[name]:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} with --matrix, which chooses its layouts itself: leave one of them out")
    own_job = config.task.network.job is not None
    chosen = cells_of_job(config.with_flags(matrix=None), size) if own_job else cells(size)
    configs = [
        cell.with_flags(**{name: given[name] for name in ("data", "seed", "deadline", "device")}) for cell in chosen
    ]
    console = screen(soft_wrap=True, stderr=config.files.json == "-")
    started = time.monotonic()
    with working(), repeatable(resolve_device(config.machine)):
        outcomes = run_cells(configs, console)
    seconds = time.monotonic() - started
    failed, words = sum(outcome.failed for outcome in outcomes), Counter(outcome.word for outcome in outcomes)
    if config.files.json:
        found = {"matrix": size, "seconds": round(seconds, 1), "failed": failed}
        write_json(config.files.json, found | {"cells": [outcome.as_data() for outcome in outcomes]})
    end = (f"{failed} failed", "bold red") if failed else ("all as due", "bold green")
    counts = ", ".join(f"{number} {word}" for word, number in words.items())
    console.print(Text.assemble(f"{len(outcomes)} cells in {seconds / 60:.1f} min: {counts}; ", end))
    return 1 if failed else 0


def run_cells(configs: Sequence[VerifyConfig], console: Console) -> list[Outcome]:
    """Runs each config; prints each that fails, with the command that runs it alone."""
    outcomes: list[Outcome] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for config in counted("cells", configs):
            with shown_by(lambda what, done, total: None):  # the bar counts cells
                outcomes.append(outcome_of(config))
            if outcomes[-1].failed:
                console.print(Text.assemble((outcomes[-1].word, "bold red"), f", {due(config)} is due: "), end="")
                console.print("\n    ".join((command(config), *outcomes[-1].told)), markup=False)
    finally:
        torch.set_num_threads(threads)
    return outcomes


def outcome_of(config: VerifyConfig) -> Outcome:
    """Runs one cell on thread ranks; an exception becomes its outcome."""
    try:
        verdict = verdict_of(config)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"in {last.name}, {last.filename}:{last.lineno}"
        return Outcome(config, "error", (f"{type(error).__name__}: {error}", where))
    outcome = Outcome(config, verdict.word if verdict.equal else "DIFFERENT")
    return Outcome(config, outcome.word, _where(verdict)) if outcome.failed else outcome


def verdict_of(config: VerifyConfig) -> Verdict:
    """Records a layout on thread ranks and compares it with its references."""
    config = with_job(config)
    validate(config)
    job = make_job(config.task, config.dtypes)
    ranks = in_threads(job, config)
    return judge(job, config, ranks, *references(job, config, ranks))


def _where(verdict: Verdict) -> tuple[str, ...]:
    """The first findings that failed, or were not bitwise, and the first messages that were not predicted."""
    wrong = [f for f in (*verdict.tree, *verdict.plain) if not f.equal] or [f for f in verdict.tree if not f.bitwise]
    lines = [line_of(finding).strip() for finding in wrong[:TOLD]]
    lines += [f"and {len(wrong) - TOLD} more findings"] * (len(wrong) > TOLD)
    if verdict.ledger:
        lines += [f"ledger: {len(verdict.ledger)} messages differ from the prediction", *verdict.ledger[:TOLD]]
    return tuple(lines)
