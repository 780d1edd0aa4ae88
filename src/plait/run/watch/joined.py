"""The watch without a launcher of plait: under a user's torchrun the ranks of a host monitor each other.

    plait.join ──► a private folder of this user, host and run
                     page             made by the first rank that comes, opened by the others
                     stack-<rank>.txt
                     told-...         one file per diagnosis, so that one rank alone reports it

The lowest rank that lives checks the others once a second, and at once when one of them ends, which the kernel reports
(a pidfd, opened when the first step begins at the latest).  It writes its findings to stderr, before torchrun's agent
can end it: SIGTERM waits for the report.
Where there are several hosts (``host_reports.py``) the host of rank 0 shows them too, and rank 0 checks the ranks of
other hosts for the fault that none of them can see alone: that others wait for them.

The last rank that leaves removes the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plait.comm.base import Comm
from plait.comm.deadline import awake_since
from plait.comm.process_identity import hosts_of
from plait.messages.escape import one_line, say
from plait.run.watch import processes
from plait.run.watch.diagnose import ENDED, LONG, STANDING, Diagnosis, block, diagnose
from plait.run.watch.folder import PAGE, WATCH, locked_folder
from plait.run.watch.host_reports import HostReports
from plait.run.watch.page import Page, Status
from plait.run.watch.processes import ProcessState, out_of_memory_kills, readable
from plait.run.watch.rank import BEAT, RankSide
from plait.run.watch.stacks import with_stacks

LOOK = 1.0
"""Seconds between two looks at the others while nothing happens."""

LATER = 3.0
"""Seconds by which rank 0 waits longer for a rank of another host, whose own ranks know more of it."""

SETTLE = 0.15
"""Seconds between the end of a rank and the report, in which the others begin their waits."""


def watch_joined(comm: Comm) -> None:
    """Starts the rank's side until ``comm.close()`` or the end of the program; prints a line where it cannot."""
    given, lacks = os.environ.get(WATCH), "a status page"
    try:
        folder, lock = (Path(given), -1) if given else locked_folder(_name(comm))
        page = _page(folder / PAGE, comm.world_size)
        neighbours = None if given else Neighbours(comm, page, folder, lock)
        RankSide(comm, page, folder, neighbours)
        lacks = "word of other hosts"
        if neighbours is not None and comm.store is not None and len(hosts_of(comm.peers)) > 1:
            neighbours.hosts = HostReports(comm.store, comm.peers, comm.rank, page)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"plait: rank {comm.rank} runs without {lacks}: {one_line(str(error))}\n")


def _name(comm: Comm) -> str:
    """The name shared by all ranks that one agent started in one round; in the next rank 0 is another process."""
    agent = processes.launcher() or (os.getppid(), processes.born(os.getppid()))
    given = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    return hashlib.sha256(repr((agent, given, [peer.token for peer in comm.peers[:1]])).encode()).hexdigest()[:16]


def _left(s: Status) -> bool:
    return s.state in ("done", "failed") or s.signal < 0 or processes.look(s.pid, s.born).state == "gone"


def _page(path: Path, ranks: int) -> Page:
    with contextlib.suppress(FileExistsError):
        return Page.create(path, ranks)
    return Page.open(path)


class Neighbours:
    """One rank's watch over the others of its host.

    Args:
        lock: the descriptor of this rank's lock on the folder.
    """

    def __init__(self, comm: Comm, page: Page, folder: Path, lock: int) -> None:
        self.comm, self.page, self.folder, self._lock = comm, page, folder, [lock]
        self._open: dict[int, int] = {}  # by rank: a descriptor that is readable once its process has ended
        self._ended: dict[int, ProcessState] = {}
        self._told: set[str] = set()
        self._at_once = False
        self._looked, self._memory = time.monotonic(), out_of_memory_kills()
        self.hosts: HostReports | None = None

    def descriptors(self) -> list[int]:
        return list(self._open.values())

    def somebody_died(self) -> bool:
        return bool(self._ended)

    def look(self) -> None:
        if self.hosts is not None:
            self.hosts.look()
        now = time.monotonic()
        if now < self._looked + LOOK and not self._at_once and not self._news():
            return
        self._at_once = False
        self._looked, statuses = now, self._meet()
        mine = self._place(statuses, now)
        fresh = self._buried(statuses)
        failed = [s.rank for s in statuses if s.state == "failed" and s.rank != self.comm.rank]
        if failed or any(state.exit_code != 0 for state in fresh):
            if "ended" not in self._told:
                time.sleep(SETTLE + min(mine, 4) * BEAT)
                self._tell(ENDED)
        elif not mine:
            self._tell(frozenset({"stopped", "stands still", "crossed", "straggler"}))

    def all_came(self) -> None:
        self._at_once = True

    def last_look(self, *, failed: bool) -> None:
        statuses = self._meet()
        self._buried(statuses)
        if failed:
            self._tell(ENDED | {"stopped", "crossed"}, but=self.comm.rank)
        if self.hosts is not None:
            self.hosts.close()
        for descriptor in [*self._open.values(), *self._lock]:
            os.close(descriptor)
        self._open, self._lock = {}, []
        if all(s.rank == self.comm.rank or _left(s) for s in statuses):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _meet(self) -> list[Status]:
        """Returns the ranks that have written on the page; for new ones it opens a descriptor that shows their end."""
        statuses = [s for s in self.page.read_all() if s.pid]
        for s in statuses:
            if s.rank not in self._open and s.rank not in self._ended and s.rank != self.comm.rank:
                with contextlib.suppress(OSError, AttributeError):  # gone, or a kernel or system that has no such thing
                    self._open[s.rank] = os.pidfd_open(s.pid)
        return statuses

    def _news(self) -> bool:
        """True if a rank has ended or said that it failed."""
        if any(self.page.failed(rank) for rank in self._open):
            return True
        return readable(list(self._open.values()), 0)

    def _buried(self, statuses: Sequence[Status]) -> list[ProcessState]:
        """The ranks that have ended since the last look, with their exit codes as far as the kernel has them."""
        fresh = []
        for s in statuses:
            if s.rank == self.comm.rank or s.rank in self._ended:
                continue
            state = processes.look(s.pid, s.born)
            if state.state == "gone":
                if state.exit_code is None and s.rank in self._open:  # the agent was the first to ask
                    state = replace(state, exit_code=processes.exit_code(self._open[s.rank]))
                memory = state.exit_code == -9 and out_of_memory_kills() > self._memory
                self._ended[s.rank] = replace(state, out_of_memory=memory)
                fresh.append(state)
                if s.rank in self._open:
                    os.close(self._open.pop(s.rank))
        return fresh

    def _place(self, statuses: Sequence[Status], now: float) -> int:
        """Counts the lower ranks that live and could report the same."""
        lower = [s for s in statuses if s.rank < self.comm.rank and s.rank not in self._ended]
        return sum(s.state not in ("done", "failed") and now - s.heartbeat < 4 * BEAT for s in lower)

    def _tell(self, kinds: frozenset[str], but: int = -1) -> None:
        """Writes the diagnoses of these kinds that no rank has reported."""
        statuses = [s for s in self.page.read_all() if s.pid]
        states = [self._ended.get(s.rank) or processes.look(s.pid, s.born) for s in statuses]
        found = self._diagnosed(statuses, states, time.monotonic())
        found = [f for f in found if f.kind in kinds and f.rank != but]
        ended = [f for f in found if f.kind in ENDED]
        fresh = ended if ended and self._claim("ended") else []
        steps = {f.rank: "" if f.kind == "straggler" else f"-{f.step}" for f in found}  # a straggler is reported once
        fresh += [f for f in found if f not in ended and self._claim(f"{f.kind}-{f.rank}{steps[f.rank]}")]
        if not fresh:
            return
        ids = {s.rank: s.pid for s in statuses if s.rank != self.comm.rank}
        text = block(with_stacks(fresh, self.folder, ids))
        say(text)
        sys.stderr.flush()
        if self.hosts is not None:
            self.hosts.send_found(text, fresh)

    def _diagnosed(self, statuses: list[Status], states: list[ProcessState], now: float) -> list[Diagnosis]:
        """Finds faults of this host, and those of other hosts that they have not reported themselves."""
        awake = awake_since()
        near = diagnose(statuses, states, now, self.comm.mesh, awake=awake)
        board = self.hosts.board if self.hosts is not None else None
        far = {s.rank: s for s in (board.statuses() if board is not None else ())}
        if board is None or not far:
            return near
        running = [ProcessState(s.pid, "running") for s in far.values()]
        whole = diagnose([*statuses, *far.values()], [*states, *running], now, self.comm.mesh, awake=awake)
        for one in whole:
            if one.rank not in far or board.has_told(one):
                continue
            if one.kind not in STANDING or now > max(far[one.rank].since, awake) + LONG + LATER:
                near.append(one)
        return near

    def _claim(self, what: str) -> bool:
        """True if this rank is the first to report it."""
        if what in self._told:
            return False
        self._told.add(what)
        try:
            os.close(os.open(self.folder / f"told-{what.replace(' ', '-')}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        except OSError:  # no room, or no folder any more: better twice than never
            pass
        return True
