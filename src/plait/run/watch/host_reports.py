"""Reports between the hosts of a run, through the store in which all ranks met.

    host b, its lowest rank    once a second      "report of b"   the state of each of its ranks, and whether it leaves
    host b, any rank           on a finding       "found"         the text on its screen, for the host of rank 0
    rank 0                     once a second      reads both

Two silences are reported.  Rank 0 names a host whose report has not changed for ``SILENT`` seconds.  The lowest rank of
a host reports that the store does not answer.  One thread asks the store, and may be held by it; the heartbeat thread
checks how long ago it answered.

Times travel as ages, because clocks differ.  The store is not authenticated, as gloo and NCCL are not.  So a report is
JSON of a fixed form, its text is cut and escaped, and nothing in it is called.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from plait.comm.agree import named
from plait.comm.deadline import awake_since, clock, within
from plait.comm.process_identity import Peer, hosts_of, shown
from plait.messages.escape import one_line, say
from plait.run.watch.diagnose import KINDS, Diagnosis, Kind
from plait.run.watch.page import STATES, Page, Status

EVERY = 1.0
"""Seconds between two reports of a host."""
SILENT = 5.0
"""Seconds after which a silence is reported."""
LEAVE_SECONDS = 2.0
"""Time that the last report and a finding may take."""
LONGEST, LONGEST_LINE, MOST_TEXT = 300, 400, 5_000
"""Characters of one text, of one line for the screen, and of all that a rank found."""
MOST_BYTES, MOST_FOUND = 2**22, 64
"""The part of a report that is parsed, and the findings that are read at once."""
STEPS = 16
"""The last steps whose times are sent: enough to find a straggler where a step takes an eighth of a second or more."""

NUMBERS, TEXTS = ("rank", "pid", "step", "count", "finished"), ("phase", "operation", "error")
"""Fields of a status that are sent as they are."""
NOT_A_REPORT = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class LostHost:
    """A host that has gone silent, with the last status of each of its ranks."""

    host: str
    seconds: float
    last: tuple[Status, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"host {one_line(self.host, 80)} ({named(self.ranks)}) was last heard {self.seconds:.1f} s ago"]
        lines += [
            f"  rank {s.rank}: was {s.state} in step {s.step}, {s.operation or 'no operation'}" for s in self.last
        ]
        return "\n".join(lines)


class HostBoard:
    """The last report of each other host, on rank 0.

    Args:
        tell: takes the findings of other hosts, as text for the screen.
        awake: returns the moment since which this process was not stopped.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], object] = say,
        awake: Callable[[], float] = awake_since,
    ) -> None:
        self._clock, self._tell, self._awake, self._lock = clock, tell, awake, threading.Lock()
        _home, *others = hosts_of(peers)
        self.ranks = {host: tuple(p.rank for p in peers if p.host == host) for host in others}
        self._heard = dict.fromkeys(others, clock())
        self._beats = dict.fromkeys(others, 0)
        self._statuses: dict[int, Status] = {}
        self._left = set[str]()
        self.found = dict[tuple[Kind, int], int]()
        """The step of each host's last finding, by kind and rank: it is not reported twice."""

    def take(self, host: str, data: bytes) -> None:
        """Reads the report of a host.  A report that was read before proves nothing.

        Raises:
            ValueError, and the other errors of ``NOT_A_REPORT``: no host of this run wrote it.
        """
        report, now = json.loads(data[:MOST_BYTES]), self._clock()
        beat, leaves = int(report["beat"]), report["leaves"] is True
        statuses = {s.rank: s for s in (_status(host, row, now) for row in report["ranks"])}
        self._refuse_strangers(host, statuses)
        with self._lock:
            if beat != self._beats[host]:
                self._beats[host], self._heard[host] = beat, now
                self._statuses |= statuses
                self._left = self._left | {host} if leaves else self._left - {host}

    def take_found(self, data: bytes) -> None:
        """Shows a finding of another host's rank, and remembers it; raises as ``take`` does."""
        report = json.loads(data[:MOST_BYTES])
        host = str(report["host"])
        found = {(_kind(kind), int(rank)): int(step) for kind, rank, step in report["found"]}
        self._refuse_strangers(host, [rank for _, rank in found])
        with self._lock:
            self.found |= found
        self._tell("".join(f"{one_line(line, LONGEST_LINE)}\n" for line in report["text"][:MOST_TEXT].splitlines()))

    def _refuse_strangers(self, host: str, ranks: Sequence[int] | Mapping[int, object]) -> None:
        if host not in self.ranks:
            raise ValueError(f"this run has no other host '{one_line(host, 80)}'")
        if strange := [rank for rank in ranks if rank not in self.ranks[host]]:
            raise ValueError(f"host {one_line(host, 80)} has no {named(strange)}")

    def statuses(self) -> list[Status]:
        """Returns the ranks of other hosts that are not silent, with times of this host's clock."""
        with self._lock:
            heard = {rank for host, ranks in self.ranks.items() if self._is_heard(host) for rank in ranks}
            return [self._statuses[rank] for rank in sorted(self._statuses) if rank in heard]

    def has_told(self, diagnosis: Diagnosis) -> bool:
        """True if its host has reported it, or has accused the rank in the same step; a straggler is reported once."""
        with self._lock:
            if diagnosis.kind == "straggler":
                return ("straggler", diagnosis.rank) in self.found
            return diagnosis.step in {step for (_, rank), step in self.found.items() if rank == diagnosis.rank}

    def _is_heard(self, host: str) -> bool:
        return self._clock() - max(self._heard[host], self._awake()) <= SILENT

    def lost(self) -> list[LostHost]:
        """Returns the silent hosts, the longest silent first, without those that left or whose ranks are all done."""
        now = self._clock()
        with self._lock:
            silent = []
            for host, heard in self._heard.items():
                last = tuple(self._statuses[rank] for rank in self.ranks[host] if rank in self._statuses)
                done = len(last) == len(self.ranks[host]) and all(s.state in ("done", "failed") for s in last)
                if not self._is_heard(host) and not done and host not in self._left:
                    silent.append(LostHost(host, now - heard, last, self.ranks[host]))
        return sorted(silent, key=lambda lost: -lost.seconds)


def report_of(statuses: Sequence[Status], now: float, beat: int, leaves: bool = False) -> bytes:
    """Returns the ``beat``-th report of a host; ``leaves`` marks the last one."""
    rows = [
        {name: getattr(s, name) for name in (*NUMBERS, *TEXTS, "state", "waited", "peers")}
        | {"since": now - s.since, "heartbeat": now - s.heartbeat}
        | {"steps": [[round(seconds, 6) for seconds in step] for step in s.steps[-STEPS:]]}
        for s in statuses
    ]
    return json.dumps({"beat": beat, "leaves": leaves, "ranks": rows}).encode()


def _kind(word: object) -> Kind:
    if (kind := next((kind for kind in KINDS if kind == word), None)) is None:
        raise ValueError(f"no finding is called '{one_line(str(word), 40)}'")
    return kind


def _status(host: str, row: Mapping[str, Any], now: float) -> Status:
    """Reads a row of a report, with times of this host's clock."""
    if row["state"] not in STATES:
        raise ValueError(f"a rank is never '{one_line(str(row['state']), 40)}'")
    numbers: dict[str, Any] = {name: int(row[name]) for name in NUMBERS}
    texts: dict[str, Any] = {name: one_line(str(row[name]), LONGEST) for name in TEXTS}
    return Status(
        **numbers,
        **texts,
        host=host,
        state=row["state"],
        waited=float(row["waited"]),
        since=now - float(row["since"]),
        heartbeat=now - float(row["heartbeat"]),
        peers=tuple(int(rank) for rank in row["peers"]),
        steps=tuple((float(computed), float(waited)) for computed, waited in row["steps"]),
    )


class HostReports:
    """One rank's part in the reports between hosts; the lowest rank of a host speaks for it.

    Args:
        store: a store that answers now; it is asked over a separate connection.

    Raises:
        RuntimeError: the store does not answer.
    """

    def __init__(
        self, store: Any, peers: Sequence[Peer], rank: int, page: Page, tell: Callable[[str], object] = say
    ) -> None:
        self._store, self._page, self._tell = store.clone(), page, tell
        self._host = next(peer.host for peer in peers if peer.rank == rank)
        self._ranks = [peer.rank for peer in peers if peer.host == self._host]
        self.board = HostBoard(peers, tell=tell) if rank == 0 else None
        self._beat, self._answered, self._told, self._refused = 0, clock(), set[str](), False
        self._stop, self._speaks = threading.Event(), rank == min(self._ranks)
        self._thread = threading.Thread(target=self._run, name="plait-hosts", daemon=True)
        if self._speaks:
            self._thread.start()

    def close(self) -> None:
        """Sends the last report."""
        self._stop.set()
        if self._speaks:
            self._thread.join(LEAVE_SECONDS)

    def look(self) -> None:
        """Reports once that a host is silent, and that it is heard again; never waits."""
        if not self._speaks:
            return
        silent, seconds = dict.fromkeys(self._told, ""), clock() - self._answered
        if seconds > SILENT:
            where = f"the store on the host of rank 0 has not been reached from host {one_line(self._host, 80)}"
            silent["of rank 0"] = f"{where} for {seconds:.1f} s"
        else:
            silent = {lost.host: str(lost) for lost in self.board.lost()} if self.board is not None else {}
        for host in sorted(silent.keys() - self._told):
            self._tell(f"plait: {silent[host]}\n")
        for host in sorted(self._told - silent.keys()):
            self._tell(f"plait: host {one_line(host, 80)} is heard again\n")
        self._told = set(silent)

    def send_found(self, text: str, diagnoses: Sequence[Diagnosis]) -> None:
        """Sends the findings that this rank has shown on its own screen to the host of rank 0."""
        found = [(d.kind, d.rank, d.step) for d in diagnoses]
        report = json.dumps({"host": self._host, "text": text, "found": found})
        with suppress(RuntimeError, TimeoutError):  # a silent store holds the asking thread, and the connection with it
            if 0 not in self._ranks:
                within(LEAVE_SECONDS, lambda: self._store.queue_push("found", report))

    def _run(self) -> None:
        leaves = False
        while not leaves:
            leaves = self._stop.wait(EVERY)
            with suppress(RuntimeError):  # the connection broke: the silence will be reported
                if self.board is None:
                    self._speak(leaves)
                else:
                    self._hear(self.board)
                self._answered = clock()

    def _speak(self, leaves: bool) -> None:
        self._beat += 1
        statuses = [status for rank in self._ranks if (status := self._page.read(rank)).pid]
        self._store.set(f"report of {self._host}", report_of(statuses, time.monotonic(), self._beat, leaves))
        if not leaves:  # the store may end with rank 0
            self._store.check([f"report of {self._host}"])  # the answer shows that the report has come

    def _hear(self, board: HostBoard) -> None:
        for host in board.ranks:
            if self._store.check([key := f"report of {host}"]):
                self._read(board.take, host, self._store.get(key))
        with suppress(dist.QueueEmptyError, NotImplementedError):  # the second: torch's store without libuv
            for _ in range(MOST_FOUND):  # not queue_len, which keeps Python's lock while it waits for the store
                self._read(board.take_found, self._store.queue_pop("found", False))

    def _read(self, take: Callable[..., None], *report: Any) -> None:
        try:
            take(*report)
        except NOT_A_REPORT as error:
            if not self._refused:
                why = one_line(f"{type(error).__name__}: {error}", 200)
                said = f"plait: the store has a report that no host of this run wrote ({why}): '{shown(report[-1])}'"
                self._tell(f"{said}\n")
            self._refused = True
