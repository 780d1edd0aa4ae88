"""The rows of the campaign: a fault, what is expected, its goal in numbers, and one trial of it.

Each trial is a run of the ``plait`` command with a real fault, watched from outside (``observed.py``).  A row meets its
goal where every trial was right and the worst of each measured number is within its limit.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from plait.chaos import between_hosts, refusals, trials, two_hosts
from plait.chaos.ground import Ground
from plait.chaos.trials import Result

__all__ = ["ROWS", "CampaignRow", "Result", "RowResult", "run_campaign"]


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
        "kill",
        "kill -9 of a rank within a step",
        "rank, step and operation named; goes on from the last checkpoint, to the bit",
        trials.killed,
        {"told": 1.0, "restarted": 5.0},
        times=50,
        short=2,
    ),
    CampaignRow("launcher", "kill -9 of the launcher", "no process is left", trials.launcher_killed, {"gone": 2.0}),
    CampaignRow(
        "signal",
        "SIGTERM, SIGUSR1, SIGHUP to the launcher or a rank",
        "a last checkpoint; 0 steps lost",
        trials.asked_to_end,
        {"ended": 10.0},
        times=12,
        short=2,
    ),
    CampaignRow(
        "stop",
        "SIGSTOP of a rank",
        "the stopped rank is named; the run goes on, to the bit",
        trials.stopped,
        {"told": 5.0},
        times=50,
        short=1,
    ),
    CampaignRow(
        "hosts",
        "SIGKILL or SIGSTOP of a rank of another host",
        "named on its host and on that of rank 0",
        between_hosts.ended_or_stopped,
        {"told": 5.0},
        short=2,
        needs=two_hosts.missing,
    ),
    CampaignRow(
        "link",
        "the link between two hosts is cut, or cut and mended",
        "each host names the other; all end, or go on, to the bit",
        between_hosts.link_cut,
        {"told": 10.0},
        short=2,
        needs=two_hosts.missing,
    ),
    CampaignRow(
        "slow", "a rank that is twice as slow, in steps of 0.1 s", "told, and not ended", trials.slow, {"steps": 20}
    ),
    CampaignRow("even", "no rank is slow", "nobody is told to be", trials.even, {"share": 0.01}),
    CampaignRow(
        "ranks",
        "a rank missing, twice, impossible, of another world",
        "a line that names it",
        refusals.wrong_ranks,
        {"refused": refusals.SHORT + 5},
        short=2,
    ),
    CampaignRow(
        "port",
        "somebody else at the port",
        "a line with the port, exit code 2",
        refusals.port_taken,
        {"refused": refusals.SHORT + 5},
    ),
    CampaignRow("disk", "a rank whose disk is full", "all end; the checkpoint before loads", refusals.full_disk),
    CampaignRow("settings", "a rank with other settings", "setting and rank named on all", refusals.other_settings),
    CampaignRow("nan", "NaN on a rank", "all stop, or all leave the step out; never saved", trials.not_a_number),
    CampaignRow(
        "collective",
        "a collective left out, in the debug mode",
        "rank, operation and line named in that step",
        refusals.left_out,
        {"told": 5.0},
    ),
    CampaignRow("sizes", "sizes that cannot be", "exit code 2, one line", refusals.impossible, {"refused": 5.0}, 12, 3),
    CampaignRow("exception", "an exception in a stage", "its traceback first", trials.raised, {"ended": 1.0}),
    CampaignRow("stranger", "garbage at every port", "loopback only; the run to the bit", refusals.strangers),
)
"""All of the campaign."""


@dataclass
class RowResult:
    """What the trials of a row showed."""

    row: CampaignRow
    results: list[Result]

    @property
    def wrong(self) -> list[str]:
        """What was not as expected."""
        return [result.wrong for result in self.results if result.wrong]

    def measured(self) -> dict[str, tuple[float, float]]:
        """(median, worst) of each number."""
        names = dict.fromkeys(name for result in self.results for name in result.seen)
        values = {name: [r.seen[name] for r in self.results if name in r.seen] for name in names}
        return {name: (statistics.median(found), max(found)) for name, found in values.items()}

    def late(self) -> list[str]:
        """Which numbers are beyond their limits, or were not measured in a trial that was right."""
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
