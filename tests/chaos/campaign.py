"""Puts real faults into real runs, and compares each result with its goal.

python tests/chaos/campaign.py                                # every row, half an hour
python tests/chaos/campaign.py --short                        # a few trials of each
python tests/chaos/campaign.py --rows kill stop --times 50    # some rows

A row is a fault, its goal in numbers, and one trial of it.  Each trial runs the ``plait`` command, harms it
and watches it from outside.  A row meets its goal if every trial is right and the worst of each number is within
its limit.

trials.py         faults that end, stop and slow ranks, signals, a full disk, strangers
between_hosts.py  faults of another host's ranks, and of the link
two_hosts.py      two hosts on one machine, made of the kernel's namespaces
ground.py         the folder of a campaign: the disturbed and the undisturbed run
observed.py       runs a command and watches it, line by line
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import between_hosts
import trials
import two_hosts
import tyro
from ground import Ground
from rich.table import Table
from trials import Result

from plait.checkpoint.files.writing import check_folder
from plait.run.launch.signals import Asked, heard
from plait.run.report.screen import screen


@dataclass(frozen=True)
class CampaignRow:
    """One fault."""

    name: str
    fault: str
    expected: str
    trial: Callable[[Ground, int], Result]
    limits: Mapping[str, float] = field(default_factory=dict)
    """The most that each measured number may be."""
    times: int = 6
    """Trials of the whole campaign."""
    short: int = 1
    """Trials of a short one."""
    needs: Callable[[], str] = str
    """Why it can't be tried on this machine; empty: it can."""


ROWS = (
    CampaignRow(
        "kill", "kill -9 of a rank within a step",
        "rank, step and operation named; goes on from the last checkpoint, to the bit",
        trials.killed, {"told": 1.0, "restarted": 5.0}, times=50, short=2,
    ),
    CampaignRow("launcher", "kill -9 of the launcher", "no process is left", trials.launcher_killed, {"gone": 2.0}),
    CampaignRow(
        "signal", "SIGTERM, SIGUSR1, SIGHUP to the launcher or a rank", "a last checkpoint; 0 steps lost",
        trials.asked_to_end, {"ended": 10.0}, times=12, short=2,
    ),
    CampaignRow(
        "stop", "SIGSTOP of a rank", "the stopped rank is named; the run goes on, to the bit",
        trials.stopped, {"told": 5.0}, times=50,
    ),
    CampaignRow(
        "hosts", "SIGKILL or SIGSTOP of a rank of another host", "named on its host and on that of rank 0",
        between_hosts.ended_or_stopped, {"told": 5.0}, short=2, needs=two_hosts.missing,
    ),
    CampaignRow(
        "link", "the link between two hosts is cut, or cut and mended",
        "each host names the other; all end, or go on, to the bit",
        between_hosts.link_cut, {"told": 10.0}, short=2, needs=two_hosts.missing,
    ),
    CampaignRow(
        "slow", "a rank that is twice as slow, in steps of 0.1 s", "told, and not ended", trials.slow, {"steps": 20}
    ),
    CampaignRow("even", "no rank is slow", "nobody is told to be", trials.even, {"share": 0.01}),
    CampaignRow("disk", "a rank whose disk is full", "all end; the checkpoint before loads", trials.full_disk),
    CampaignRow("stranger", "garbage at every port", "loopback only; the run to the bit", trials.strangers),
)  # fmt: skip
"""All of the campaign."""


@dataclass
class RowResult:
    row: CampaignRow
    results: list[Result]

    @property
    def wrong(self) -> list[str]:
        return [result.wrong for result in self.results if result.wrong]

    def measured(self) -> dict[str, tuple[float, float]]:
        """(median, worst) of each number."""
        names = dict.fromkeys(name for result in self.results for name in result.seen)
        values = {name: [r.seen[name] for r in self.results if name in r.seen] for name in names}
        return {name: (statistics.median(found), max(found)) for name, found in values.items()}

    def late(self) -> list[str]:
        """The numbers that are beyond their limits, or were not measured in a right trial."""
        right = [result.seen for result in self.results if not result.wrong]
        return [
            name
            for name, limit in self.row.limits.items()
            if not right or any(seen.get(name, math.inf) > limit for seen in right)
        ]

    @property
    def met(self) -> bool:
        return not self.wrong and not self.late()


def run_campaign(
    rows: Sequence[CampaignRow],
    folder: Path | None = None,
    *,
    times: int | None = None,
    short: bool = False,
    seed: int = 0,
) -> Generator[RowResult | tuple[CampaignRow, int, Result]]:
    """Runs the rows one after the other; yields each trial, then the row.

    Args:
        folder: where runs are kept; None: nowhere.
        times: trials of each row, instead of its own number.
        short: a few of each.
    """
    with tempfile.TemporaryDirectory(prefix="plait-chaos-", ignore_cleanup_errors=True) as temporary:
        ground = Ground(folder or Path(temporary), random=Random(seed))
        ground.folder.mkdir(parents=True, exist_ok=True)
        for row in rows:
            results = []
            for number in range(times or (row.short if short else row.times)):
                with ground.trial():
                    try:
                        result = row.trial(ground, number)
                    except (ValueError, OSError) as error:
                        result = Result(f"{type(error).__name__}: {error}")
                    orphans = sum(child.orphans for child in ground.children)
                if orphans and not result.wrong:
                    result = Result(f"{orphans} processes were left behind", result.seen)
                results.append(result)
                yield row, number, result
            yield RowResult(row, results)


@dataclass(frozen=True)
class Campaign:
    """Does real runs real harm, and compares the outcomes with the goals.

    Exit code 0: every goal is met, 1: one is not, 2: bad input.
    """

    rows: Annotated[tuple[str, ...], tyro.conf.arg(help=f"Which of: {', '.join(row.name for row in ROWS)}.")] = ()
    """The faults; none: all."""
    times: int | None = None
    """Trials of each; None: as many as its goal asks for."""
    short: bool = False
    """A few trials of each, in some minutes."""
    seed: int = 0
    """Decides the steps and operations at which faults happen."""
    folder: str | None = None
    """Keeps the runs in this folder; None: they are removed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign, prints it trial by trial and as a table; returns the exit code."""
    config = tyro.cli(Campaign, prog="campaign.py", args=argv)
    try:
        rows = chosen(config)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = None if config.folder is None else Path(config.folder).resolve()
    console, found = screen(soft_wrap=True), list[RowResult]()
    events = run_campaign(rows, folder, times=config.times, short=config.short, seed=config.seed)
    with heard(Asked(lambda _: None, grace=0.0)), closing(events):  # a signal ends it, and all of its runs
        for event in events:
            if isinstance(event, RowResult):
                found.append(event)
                continue
            row, number, result = event
            seen = ", ".join(f"{name} {value:.3g}" for name, value in result.seen.items())
            console.print(f"{row.name} {number}: {result.wrong or 'right'}{f' ({seen})' if seen else ''}")
    for row in ROWS if not config.rows else ():
        if reason := row.needs():
            console.print(f"{row.name}: not tried: {reason}")
    console.print(table_of(found))
    return 0 if all(result.met for result in found) else 1


def chosen(config: Campaign) -> list[CampaignRow]:
    """The rows to run; ValueError for settings that cannot be, and for a named row that this machine cannot try."""
    if config.times is not None and config.times < 1:
        raise ValueError(f"times is {config.times}: give a whole number from 1")
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in config.rows if name not in known]:
        raise ValueError(f"no row {unknown[0]!r}: there are {', '.join(known)}")
    if config.folder is not None:
        check_folder("folder", config.folder)
        if Path(config.folder).is_dir() and any(Path(config.folder).iterdir()):
            raise ValueError(f"folder {config.folder!r} is not empty: give a new one")
    if absent := [name for name in config.rows if known[name].needs()]:
        raise ValueError(f"row {absent[0]!r} can't be tried here: {known[absent[0]].needs()}")
    return [row for row in (known[name] for name in dict.fromkeys(config.rows or known)) if not row.needs()]


def table_of(found: Sequence[RowResult]) -> Table:
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


if __name__ == "__main__":
    sys.exit(main())
