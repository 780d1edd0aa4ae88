"""``plait chaos``: the table of faults, goals and what was measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from plait.chaos import ROWS, run_campaign
from plait.chaos.campaign import RowResult
from plait.files.writing import check_folder, write_json
from plait.launch.signals import Asked, heard
from plait.report.screen import screen


@dataclass(frozen=True)
class ChaosConfig:
    """Do real runs real harm, and hold what becomes of them against the goals.

    Exit code 0: every goal is met, 1: one is not, 2: bad input.
    """

    rows: Annotated[tuple[str, ...], tyro.conf.arg(help=f"Which of: {', '.join(row.name for row in ROWS)}.")] = ()
    """Which faults; none: all."""
    times: int | None = None
    """Trials of each; None: as many as its goal asks for."""
    short: bool = False
    """A few trials of each, in some minutes."""
    seed: int = 0
    """Of the steps and operations at which faults happen."""
    folder: str | None = None
    """Keep the runs in this folder; None: they are removed."""
    json: str | None = None
    """Write the results here as JSON; "-" is the standard output."""


def run(config: ChaosConfig, argv: Sequence[str] = ()) -> int:
    """The campaign, trial by trial, and its table."""
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in config.rows if name not in known]:
        raise ValueError(f"no row {unknown[0]!r}: there are {', '.join(known)}")
    if config.folder is not None:
        check_folder("folder", config.folder)
        if Path(config.folder).is_dir() and any(Path(config.folder).iterdir()):
            raise ValueError(f"folder {config.folder!r} is not empty: give a new one")
    rows = [known[name] for name in dict.fromkeys(config.rows or known)]
    why = {row.name: row.needs() for row in rows}
    if config.rows and (absent := [name for name, reason in why.items() if reason]):
        raise ValueError(f"row {absent[0]!r} can't be tried here: {why[absent[0]]}")
    rows = [row for row in rows if not why[row.name]]
    console = screen(stderr=config.json == "-", soft_wrap=True)
    found: list[RowResult] = []
    folder = None if config.folder is None else Path(config.folder).resolve()
    events = run_campaign(rows, folder, times=config.times, short=config.short, seed=config.seed)
    with heard(Asked(lambda _: None, grace=0.0)), closing(events):  # a signal ends it, and all of its runs
        for event in events:
            if isinstance(event, RowResult):
                found.append(event)
                continue
            row, number, result = event
            seen = ", ".join(f"{name} {value:.3g}" for name, value in result.seen.items())
            console.print(f"{row.name} {number}: {result.wrong or 'right'}{f' ({seen})' if seen else ''}")
    for name, reason in why.items():
        if reason:
            console.print(f"{name}: not tried: {reason}")
    console.print(table_of(found))
    if config.json is not None:
        write_json(config.json, {"rows": [as_json(result) for result in found]})
    return 0 if all(result.met for result in found) else 1


def table_of(found: list[RowResult]) -> Table:
    """A line for each fault."""
    table = Table(title="faults", title_justify="left")
    for column in ("fault", "expected", "trials", "right", "measured: median, worst (goal)", ""):
        table.add_column(column, overflow="fold")
    for result in found:
        measured = []
        for name, (middle, worst) in result.measured().items():
            limit = result.row.limits.get(name)
            goal = "" if limit is None else f" (<= {limit:g})"
            measured.append(f"{name} {middle:.2f}, {worst:.2f}{goal}")
        right = len(result.results) - len(result.wrong)
        cells = [result.row.fault, result.row.expected, str(len(result.results)), str(right), "\n".join(measured)]
        table.add_row(*cells, "met" if result.met else "NOT MET")
    return table


def as_json(result: RowResult) -> dict[str, object]:
    """A row for a program."""
    return {
        "row": result.row.name,
        "trials": len(result.results),
        "wrong": result.wrong,
        "limits": dict(result.row.limits),
        "measured": {name: {"median": m, "worst": w} for name, (m, w) in result.measured().items()},
        "met": result.met,
    }
