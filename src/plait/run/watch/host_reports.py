"""Reports between the hosts of a run, through the store in which all ranks met.

    host b    its lowest rank, once a second; any rank on a finding    "report of b"   each rank's record and process
    rank 0    once a second                                            reads those of all other hosts

Rank 0 uses them to diagnose the ranks of all hosts.  It names a host whose report has not changed for ``SILENT``
seconds; the lowest rank of a host reports that the store does not answer.  One thread asks the store, which may block
it; the heartbeat thread checks how long ago it answered.

Times travel as ages, because clocks differ.  The store is not authenticated, like gloo and NCCL.  So a report is JSON
of a fixed form, text is escaped when it is shown, and nothing in it is called.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from plait.comm.deadline import awake_since, clock, within
from plait.comm.process_identity import Peer, from_json, hosts_of
from plait.comm.texts import named
from plait.messages.escape import one_line, say
from plait.run.watch.page import Status
from plait.run.watch.processes import ProcessState

EVERY = 1.0
"""Seconds between two reports of a host."""
SILENT = 5.0
"""Seconds after which a silence is reported."""
LEAVE_SECONDS = 2.0
"""Time that the last report and one on a finding may take."""
STEPS = 16
"""The last steps whose times are sent: enough to find a straggler if a step takes an eighth of a second or more."""

Clock = Callable[[], float]
Seen = list[tuple[Status, ProcessState]]
"""Ranks with their processes."""


@dataclass(frozen=True)
class HostReport:
    """All ranks of a host."""

    beat: int
    """A number that differs in each report."""
    leaves: bool
    """True in the last report."""
    now: float
    """``time.monotonic`` of that host."""
    statuses: list[str]
    processes: list[str]
    """Each is JSON, in the order of ``statuses``."""

    def ranks(self, now: float) -> Seen:
        """Returns the ranks, with times of this host's clock; ConnectionError if plait did not write them."""
        statuses = [from_json(Status, text) for text in self.statuses]
        moved = [replace(s, since=now - self.now + s.since, heartbeat=now - self.now + s.heartbeat) for s in statuses]
        return list(zip(moved, [from_json(ProcessState, text) for text in self.processes], strict=False))


def report_of(seen: Seen, now: float, beat: int, *, leaves: bool = False) -> str:
    statuses = [json.dumps(asdict(replace(s, steps=s.steps[-STEPS:]))) for s, _ in seen]
    return json.dumps(asdict(HostReport(beat, leaves, now, statuses, [json.dumps(asdict(p)) for _, p in seen])))


class HostBoard:
    """The last report of each other host, on rank 0.  ``awake`` returns the moment since which this process was not
    stopped."""

    def __init__(self, peers: Sequence[Peer], clock: Clock = time.monotonic, awake: Clock = awake_since) -> None:
        self._clock, self._awake, self._lock = clock, awake, threading.Lock()
        _home, *others = hosts_of(peers)
        self.ranks = {host: tuple(p.rank for p in peers if p.host == host) for host in others}
        self._heard = dict.fromkeys(others, clock())
        self._reports: dict[str, HostReport] = {}
        self._seen: dict[str, Seen] = {host: [] for host in others}

    def take(self, host: str, data: str | bytes) -> None:
        """Reads the report of a host.  A report that was read before proves nothing.  ConnectionError if plait did not
        write it."""
        report, now = from_json(HostReport, data), self._clock()
        seen = report.ranks(now)
        if any(s.rank not in self.ranks[host] or any(len(pair) != 2 for pair in s.steps) for s, _ in seen):
            raise ConnectionError(f"host {one_line(host, 80)} has other ranks, or steps without two times")
        with self._lock:
            if host not in self._reports or report.beat != self._reports[host].beat:
                self._reports[host], self._heard[host], self._seen[host] = report, now, seen or self._seen[host]

    def seen(self) -> Seen:
        """Returns the ranks of other hosts that are not silent."""
        with self._lock:
            return [one for host, seen in self._seen.items() if self._is_heard(host) for one in seen]

    def _is_heard(self, host: str) -> bool:
        return self._clock() - max(self._heard[host], self._awake()) <= SILENT

    def lost(self) -> dict[str, str]:
        """Returns a text for each silent host, without those that left."""
        now, silent = self._clock(), {}
        with self._lock:
            for host, heard in self._heard.items():
                seen, ranks = self._seen[host], self.ranks[host]
                left = host in self._reports and self._reports[host].leaves
                if not (self._is_heard(host) or left):
                    lines = [f"host {host} ({named(ranks)}) was last heard {now - heard:.1f} s ago"]
                    lines += [
                        f"  rank {s.rank}: was {s.state} in step {s.step}, {s.operation or 'no operation'}"
                        for s, _ in seen
                    ]
                    silent[host] = "\n".join(one_line(line, 400) for line in lines)
        return silent


class HostReports:
    """One rank's part in the reports between hosts; the lowest rank of a host reports for it.  ``seen`` returns the
    ranks of this host.  A separate connection to the store is used; RuntimeError if the store does not answer."""

    def __init__(
        self,
        store: Any,
        peers: Sequence[Peer],
        rank: int,
        seen: Callable[[], Seen],
        tell: Callable[[str], object] = say,
    ) -> None:
        self._store, self._seen, self._tell = store.clone(), seen, tell
        self._host = next(peer.host for peer in peers if peer.rank == rank)
        ranks = [peer.rank for peer in peers if peer.host == self._host]
        self._of_rank_0, self._speaks = 0 in ranks, rank == min(ranks)
        self.board = HostBoard(peers) if rank == 0 else None
        self._answered, self._told = clock(), set[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plait-hosts", daemon=True)
        if self._speaks:
            self._thread.start()

    def close(self) -> None:
        """Sends the last report."""
        self._stop.set()
        if self._speaks:
            self._thread.join(LEAVE_SECONDS)

    def look(self) -> None:
        """Reports once that a host is silent, and once that it is heard again; never waits."""
        if not self._speaks:
            return
        silent, seconds = dict.fromkeys(self._told, ""), clock() - self._answered
        if seconds > SILENT:
            where = f"the store on the host of rank 0 has not been reached from host {one_line(self._host, 80)}"
            silent["of rank 0"] = f"{where} for {seconds:.1f} s"
        else:
            silent = self.board.lost() if self.board is not None else {}
        for host in sorted(silent.keys() - self._told):
            self._tell(f"plait: {silent[host]}\n")
        for host in sorted(self._told - silent.keys()):
            self._tell(f"plait: host {one_line(host, 80)} is heard again\n")
        self._told = set(silent)

    def speak_now(self) -> None:
        """Sends the report after a finding, because this rank may be ended next."""
        with suppress(RuntimeError, TimeoutError):  # a silent store holds the asking thread, and the connection with it
            if not self._of_rank_0:
                within(LEAVE_SECONDS, self._speak)

    def _run(self) -> None:
        leaves = False
        while not leaves:
            leaves = self._stop.wait(EVERY)
            with suppress(RuntimeError):  # the connection broke: the silence will be reported
                if self.board is None:
                    self._speak(leaves=leaves)
                else:
                    self._hear(self.board)
                self._answered = clock()

    def _speak(self, *, leaves: bool = False) -> None:
        report = report_of(self._seen(), time.monotonic(), time.monotonic_ns(), leaves=leaves)
        self._store.set(f"report of {self._host}", report)
        if not leaves:  # the store may end with rank 0
            self._store.check([f"report of {self._host}"])  # the answer shows that the report has come

    def _hear(self, board: HostBoard) -> None:
        for host in board.ranks:
            if self._store.check([key := f"report of {host}"]):
                with suppress(ConnectionError):  # plait did not write it: that host counts as silent
                    board.take(host, self._store.get(key))
