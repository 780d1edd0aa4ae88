"""Watches without plait's launcher: under a user's torchrun, the ranks of a host monitor each other.

    plait.join ──► a private folder of this user, host and run
                     status-<rank>    the status page
                     stack-<rank>.txt
                     told-...         one file per diagnosis, so that only one rank reports it
                     left-<rank>      it has reported, and needs the folder no more

The lowest rank that lives checks the others once a second, and at once when one of them ends, which the kernel reports
(through a pidfd, opened no later than the first step).  It writes its findings to stderr before torchrun's agent can
end it: SIGTERM waits for the report.
With several hosts (``host_reports.py``), rank 0 diagnoses the ranks of all of them.

The last rank that leaves removes the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plait.comm.base import Comm
from plait.comm.deadline import awake_since
from plait.comm.process_identity import hosts_of
from plait.messages.escape import one_line, say
from plait.run.watch import processes
from plait.run.watch.diagnose import ENDED, LONG, STANDING, Diagnosis, block, cause, diagnose, end_of
from plait.run.watch.host_reports import HostReports, Seen
from plait.run.watch.page import WATCH, Page, Status
from plait.run.watch.processes import ProcessState, out_of_memory_kills, readable
from plait.run.watch.rank import BEAT, RankSide
from plait.run.watch.stacks import with_stacks

LOOK = 1.0
"""Seconds between two looks at the others while nothing happens."""

LATER = 3.0
"""Seconds by which rank 0 waits longer for a rank of another host, because its report may be old."""

SETTLE = 1.5 * BEAT
"""Seconds between the end of a rank and the report, in which the others begin their waits and record them."""


def watch_joined(comm: Comm) -> None:
    """Starts the rank's side until ``comm.close()`` or the end of the program; prints a line if it cannot."""
    given, lacks = os.environ.get(WATCH), "a status page"
    try:
        folder = Path(given) if given else shared_folder(_name(comm))
        page = Page(folder, comm.world_size)
        neighbours = None if given else Neighbours(comm, page)
        RankSide(comm, page, neighbours)
        lacks = "word of other hosts"
        if neighbours is not None and comm.store is not None and len(hosts_of(comm.peers)) > 1:
            neighbours.hosts = HostReports(comm.store, comm.peers, comm.rank, neighbours.seen)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"plait: rank {comm.rank} runs without {lacks}: {one_line(str(error))}\n")


def _name(comm: Comm) -> str:
    """The name shared by all ranks that one agent started in one round; the next round has another rank 0 process."""
    agent = processes.launcher() or (os.getppid(), processes.born(os.getppid()))
    given = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    return hashlib.sha256(repr((agent, given, [peer.token for peer in comm.peers[:1]])).encode()).hexdigest()[:16]


def shared_folder(name: str) -> Path:
    """Opens or makes the folder of this name, which only this user may enter: ValueError if something else has its
    name, or another user owns or may enter it.  If all its users are killed at once it stays in the temporary
    folder."""
    user = os.getuid()
    folder = Path(tempfile.gettempdir()) / f"plait-ranks-{user}-{name}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user and stat.S_IMODE(found.st_mode) == 0o700:
        return folder
    raise ValueError(
        f"{one_line(str(folder))} is not a folder of user {user} with mode 700: "
        f"another user may have made it; set TMPDIR to a folder that only you may enter"
    )


class Neighbours:
    """One rank's watch over the others of its host."""

    def __init__(self, comm: Comm, page: Page) -> None:
        self.comm, self.page = comm, page
        self._open: dict[int, int] = {}  # by rank: a descriptor that is readable once its process has ended
        self.ended: dict[int, ProcessState] = {}
        self._told: set[str] = set()
        self.at_once, self._seeing = False, threading.Lock()
        self._looked, self._memory = time.monotonic(), out_of_memory_kills()
        self.hosts: HostReports | None = None

    def descriptors(self) -> list[int]:
        """Returns descriptors that become readable when something happens."""
        return list(self._open.values())

    def look(self, beat: Callable[[], None]) -> None:
        """Checks the others at every heartbeat, and if a descriptor is readable; ``beat`` writes this rank's record."""
        if self.hosts is not None:
            self.hosts.look()
        now = time.monotonic()
        if now < self._looked + LOOK and not (self.at_once or self.page.failed or readable(self.descriptors(), 0)):
            return
        self.at_once, self._looked = False, now
        seen = [*self.seen(), *self._far()]
        lower = [s for s, p in seen if s.rank < self.comm.rank and p.state != "gone"]
        before = sum(s.state not in ("done", "failed") and now - s.heartbeat < 4 * BEAT for s in lower)
        if "ended" not in self._told and any(end_of(s, p) for s, p in seen if s.rank != self.comm.rank):
            for _ in range(3):
                time.sleep((SETTLE + min(before, 4) * BEAT) / 3)
                beat()  # another rank may report this rank's state
            self._tell(ENDED, beat=beat)
        elif not before:
            self._tell(frozenset({"stopped", "stands still", "crossed", "straggler"}))

    def last_look(self, *, failed: bool) -> None:
        if failed:
            self._tell(ENDED | {"stopped", "crossed"}, but=self.comm.rank)
        with contextlib.suppress(OSError):
            (self.page.folder / f"left-{self.comm.rank}").touch()
        seen = self.seen()
        if self.hosts is not None:
            self.hosts.close()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}
        if all(p.state == "gone" or (self.page.folder / f"left-{s.rank}").exists() for s, p in seen):
            shutil.rmtree(self.page.folder, ignore_errors=True)

    def seen(self) -> Seen:
        """Returns the ranks that have written on the page, with their exit codes if the kernel has them."""
        with self._seeing:
            return [(s, self.ended.get(s.rank) or self._met(s)) for s in self.page.read_all() if s.pid]

    def _met(self, s: Status) -> ProcessState:
        """Opens a descriptor that shows the end of a live process; buries a process that has ended."""
        if s.rank not in self._open and s.rank != self.comm.rank:
            with contextlib.suppress(OSError):  # gone
                self._open[s.rank] = os.pidfd_open(s.pid)
        state = processes.look(s.pid, s.born)
        if state.state != "gone":
            return state
        descriptor = self._open.pop(s.rank, None)
        if descriptor is not None:
            os.close(descriptor)
        memory = state.exit_code == -9 and out_of_memory_kills() > self._memory
        self.ended[s.rank] = replace(state, out_of_memory=memory)
        return self.ended[s.rank]

    def _far(self) -> Seen:
        return self.hosts.board.seen() if self.hosts is not None and self.hosts.board is not None else []

    def _tell(self, kinds: frozenset[str], but: int = -1, beat: Callable[[], None] = lambda: None) -> None:
        """Writes the diagnoses of these kinds that no rank of this host has reported."""
        found = cause(lambda: [f for f in self._diagnosed(self.seen(), time.monotonic()) if f.kind in kinds], beat)
        found = [f for f in found if f.rank != but]
        ended = [f for f in found if f.kind in ENDED]
        fresh = ended if ended and self._claim("ended") else []
        steps = {f.rank: "" if f.kind == "straggler" else f"-{f.step}" for f in found}  # a straggler is reported once
        fresh += [f for f in found if f not in ended and self._claim(f"{f.kind}-{f.rank}{steps[f.rank]}")]
        if not fresh:
            return
        pids = {s.rank: s.pid for s, _ in self.seen() if s.rank != self.comm.rank}
        say(block(with_stacks(fresh, self.page.folder, pids)))
        sys.stderr.flush()
        if self.hosts is not None:
            self.hosts.speak_now()

    def _diagnosed(self, near: Seen, now: float) -> list[Diagnosis]:
        """Finds faults of this host, on rank 0 those of all hosts."""
        awake, far = awake_since(), self._far()
        seen = [*near, *far]
        found = diagnose([s for s, _ in seen], [p for _, p in seen], now, self.comm.mesh, awake=awake)
        standing = {s.rank: max(s.since, awake) for s, _ in far}  # from reports that may be old
        return [f for f in found if f.kind not in STANDING or now > standing.get(f.rank, -LATER - LONG) + LATER + LONG]

    def _claim(self, what: str) -> bool:
        """True if this rank is the first of its host to report it."""
        if what in self._told:
            return False
        self._told.add(what)
        with contextlib.suppress(OSError):  # no room, or no folder: two reports are better than none
            try:
                (self.page.folder / f"told-{what.replace(' ', '-')}").touch(0o600, exist_ok=False)
            except FileExistsError:
                return False
        return True
