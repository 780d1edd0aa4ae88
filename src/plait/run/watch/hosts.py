"""What the ranks of other hosts say, on the host of rank 0, and which host is not heard any more.

    host a (rank 0)                                      host b
    HostBoard ◄── Listener ◄──── the channel ◄── Sender ◄── the page of b, once in a second
        │                                    ◄── Sender ◄── what a rank of b has found wrong and told on its own screen
        ├── host b (ranks 4 to 7) was last heard 6 s ago     └── host a of rank 0 has not taken a word for 6 s
        └── what b found; what all pages together show (``joined.py``)

The lowest rank of each host speaks for it, and says when it leaves, after which nobody waits for its word.  Times are
sent as ages, because clocks differ.  Who wants it says where the host of rank 0 listens, and gives all hosts one key:

    PLAIT_CHANNEL=10.0.0.5:29600  PLAIT_KEY_FILE=~/.plait-key
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from plait.comm.agree import named
from plait.comm.base import Comm
from plait.comm.deadline import awake_since, clock
from plait.comm.observer import Observer
from plait.comm.peer import Peer
from plait.messages.escape import one_line, say
from plait.run.watch.channel import Address, Listener, Message, Sender
from plait.run.watch.diagnose import KINDS, Diagnosis, Kind
from plait.run.watch.key import ChannelKey, read_key
from plait.run.watch.page import STATES, Page, Status

EVERY = 1.0
"""Seconds between two reports of a host."""
SILENT = 5.0
"""Seconds after which a host that says nothing is told."""
AT_ONCE = 4
"""Ranks in one message: with the longest texts of the widest characters it stays below ``MOST_BYTES``."""
LONGEST, LONGEST_LINE = 300, 400
"""Characters of a text, and of a line for the screen."""
MOST_TEXT = 5_000
"""Characters of what a host has found, which may take twelve bytes each."""
MOST_FOUND = 64
STEPS = 16
"""The last steps whose times are sent: of steps above an eighth of a second they are enough to find a straggler."""
CHANNEL = "PLAIT_CHANNEL"


@dataclass(frozen=True)
class Lost:
    """A host that is not heard."""

    host: str
    seconds: float
    last: tuple[Status, ...]
    """What its ranks said last."""
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"host {one_line(self.host, 80)} ({named(self.ranks)}) was last heard {self.seconds:.1f} s ago"]
        lines += [
            f"  rank {s.rank}: was {s.state} in step {s.step}, {s.operation or 'no operation'}" for s in self.last
        ]
        return "\n".join(lines)


class HostBoard:
    """What was last heard of each of the other hosts.

    ``tell`` is given what they find, as text for the screen; ``awake`` says since when this process was not stopped.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], object] = say,
        awake: Callable[[], float] = lambda: 0.0,
    ) -> None:
        home = next(peer.host for peer in peers if peer.rank == 0)
        self._clock, self._tell, self._awake, self._lock, start = clock, tell, awake, threading.Lock(), clock()
        self.found = dict[tuple[Kind, int], int]()
        """The step of what they have found last, by kind and rank, so that it is not told twice."""
        self.ranks = {host: tuple(p.rank for p in peers if p.host == host) for host in hosts_of(peers) if host != home}
        self._heard = dict.fromkeys(self.ranks, start)
        self._statuses: dict[int, Status] = {}
        self._left = set[str]()

    def take(self, message: Message) -> None:
        """A host's report.

        Raises:
            ValueError: a host or a rank that is not of this run, or no report at all.
        """
        try:
            host = str(message["host"])
            if host not in self.ranks:
                raise ValueError(f"this run has no other host '{one_line(host, 80)}'")
            statuses = [_status(host, row, self._clock()) for row in message["ranks"]]
            found = {(_kind(kind), int(rank)): int(step) for kind, rank, step in message.get("found", ())}
            lines = str(message.get("text", ""))[:MOST_TEXT].splitlines()
            text = "".join(f"{one_line(line, LONGEST_LINE)}\n" for line in lines)
            named_ranks = [s.rank for s in statuses] + [rank for _, rank in found]
            if strange := [rank for rank in named_ranks if rank not in self.ranks[host]]:
                raise ValueError(f"host {one_line(host, 80)} has no {named(strange)}")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no report of a host: {one_line(repr(error), 200)}") from error
        with self._lock:
            if "leaves" in message:
                self._left = self._left | {host} if message["leaves"] is True else self._left - {host}
            self._heard[host] = self._clock()
            self._statuses |= {s.rank: s for s in statuses}
            self.found |= found
        if text:
            self._tell(text)

    def statuses(self) -> list[Status]:
        """Of the ranks on other hosts that have said something and are heard, with times of this host's clock."""
        with self._lock:
            heard = {rank for host, ranks in self.ranks.items() if self._is_heard(host) for rank in ranks}
            return [self._statuses[rank] for rank in sorted(self._statuses) if rank in heard]

    def has_told(self, diagnosis: Diagnosis) -> bool:
        """Whether its host has told it, or another of the same rank in the same step; a straggler is told once."""
        with self._lock:
            if diagnosis.kind == "straggler":
                return ("straggler", diagnosis.rank) in self.found
            return diagnosis.step in {step for (_, rank), step in self.found.items() if rank == diagnosis.rank}

    def _is_heard(self, host: str) -> bool:
        return self._clock() - max(self._heard[host], self._awake()) <= SILENT

    def lost(self) -> list[Lost]:
        """The hosts that are not heard, the longest silent first.  One whose ranks are all done may be, and one that
        said that it leaves."""
        now = self._clock()
        with self._lock:
            silent = []
            for host, heard in self._heard.items():
                last = tuple(self._statuses[rank] for rank in self.ranks[host] if rank in self._statuses)
                done = len(last) == len(self.ranks[host]) and all(s.state in ("done", "failed") for s in last)
                if not self._is_heard(host) and not done and host not in self._left:
                    silent.append(Lost(host, now - heard, last, self.ranks[host]))
        return sorted(silent, key=lambda lost: -lost.seconds)


def report_of(host: str, statuses: Sequence[Status], now: float, leaves: bool = False) -> list[Message]:
    """What a host says of its ranks, in messages of a few each.

    Args:
        leaves: it says no more.
    """
    rows: list[dict[str, Any]] = [
        {
            "rank": s.rank,
            "pid": s.pid,
            "state": s.state,
            "step": s.step,
            "phase": s.phase,
            "operation": s.operation,
            "error": s.error,
            "count": s.count,
            "waited": s.waited,
            "since": now - s.since,
            "heartbeat": now - s.heartbeat,
            "peers": s.peers,
            "finished": s.finished,
            "steps": [[round(seconds, 6) for seconds in step] for step in s.steps[-STEPS:]],
        }
        for s in statuses
    ]
    parts = [rows[i : i + AT_ONCE] for i in range(0, max(1, len(rows)), AT_ONCE)]
    return [{"host": host, "ranks": part, "leaves": leaves} for part in parts]


def _kind(word: object) -> Kind:
    if (kind := next((kind for kind in KINDS if kind == word), None)) is None:
        raise ValueError(f"nothing that is found is called '{one_line(str(word), 40)}'")
    return kind


def _status(host: str, row: Mapping[str, Any], now: float) -> Status:
    """A row of a report; a KeyError, TypeError or ValueError if it is none."""
    if row["state"] not in STATES:
        raise ValueError(f"a rank is never '{one_line(str(row['state']), 40)}'")
    return Status(
        rank=int(row["rank"]),
        host=host,
        pid=int(row["pid"]),
        state=row["state"],
        step=int(row["step"]),
        phase=one_line(str(row["phase"]), LONGEST),
        operation=one_line(str(row["operation"]), LONGEST),
        error=one_line(str(row["error"]), LONGEST),
        count=int(row["count"]),
        waited=float(row["waited"]),
        since=now - float(row["since"]),
        heartbeat=now - float(row["heartbeat"]),
        peers=tuple(int(rank) for rank in row["peers"]),
        finished=int(row["finished"]),
        steps=tuple((float(computed), float(waited)) for computed, waited in row["steps"]),
    )


def hosts_of(peers: Sequence[Peer]) -> list[str]:
    """The hosts of a run, that of rank 0 first."""
    return list(dict.fromkeys(peer.host for peer in sorted(peers, key=lambda peer: peer.rank)))


class HostSide(Observer):
    """The leader's part: a thread that listens on the host of rank 0, and speaks on the others, until the world ends.

    ``tell`` is given one text when a host is lost, and one when it is heard again.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        rank: int,
        page: Page,
        end: Listener | Sender,
        board: HostBoard | None,
        tell: Callable[[str], object],
    ) -> None:
        self._host = next(peer.host for peer in peers if peer.rank == rank)
        self._ranks = [peer.rank for peer in peers if peer.host == self._host]
        self._page, self._end, self._board, self._tell = page, end, board, tell
        self._stop, self._told = threading.Event(), set[str]()
        self._sent, self._pid = clock(), os.getpid()
        atexit.register(self.closed)
        self._thread = threading.Thread(target=self._run, name="plait-hosts", daemon=True)
        self._thread.start()

    def closed(self) -> None:
        """Ends the thread, after a last report.  A second time, and in a fork, nothing."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        atexit.unregister(self.closed)
        self._stop.set()
        self._thread.join(10)
        self._end.close()

    def _run(self) -> None:
        while True:
            last = self._stop.wait(EVERY)
            lost = self._speak(last) if self._board is None else {one.host: str(one) for one in self._board.lost()}
            for host in [] if last else sorted(lost.keys() - self._told):
                self._tell(f"plait: {lost[host]}\n")
            for host in [] if last else sorted(self._told - lost.keys()):
                self._tell(f"plait: host {one_line(host, 80)} is heard again\n")
            self._told = set(lost)
            if last:
                return

    def _speak(self, leaves: bool) -> dict[str, str]:
        """Sends the page; what there is to tell, by host, if it has not got through for long."""
        assert isinstance(self._end, Sender)
        now = time.monotonic()
        try:
            statuses = [status for rank in self._ranks if (status := self._page.read(rank)).pid]
            for message in report_of(self._host, statuses, now, leaves):
                self._end.send(message)
        except OSError as error:
            silent = clock() - self._sent
            text = f"the host of rank 0 has not been reached from host {one_line(self._host, 80)} for {silent:.1f} s"
            return {"of rank 0": f"{text}: {error}"} if silent > SILENT else {}
        self._sent = clock()
        return {}


@dataclass(frozen=True)
class HostChannel:
    """Where the host of rank 0 listens, with the key of the run; what this rank has to do with other hosts."""

    address: Address
    key: ChannelKey
    peers: tuple[Peer, ...]
    host: str
    """This rank's."""

    @classmethod
    def of(cls, comm: Comm, environment: Mapping[str, str] = os.environ) -> Self | None:
        """None where there is one host, or no channel was asked for.

        Raises:
            ValueError: an address or a key that cannot be.
            OSError: a key that cannot be read.
        """
        given = environment.get(CHANNEL)
        if len(hosts_of(comm.peers)) < 2 or not given:
            return None
        address, key = parse_address(given), read_key(environment)
        if key is None:
            raise ValueError(f"{CHANNEL} is set, but no key: give all hosts the same PLAIT_KEY_FILE")
        return cls(address, key, tuple(comm.peers), next(p.host for p in comm.peers if p.rank == comm.rank))

    @property
    def is_home(self) -> bool:
        """Whether this is the host of rank 0."""
        return self.host == hosts_of(self.peers)[0]

    def watch(self, comm: Comm, page: Page) -> HostBoard | None:
        """Starts this rank's part, if it is the lowest of its host; the board, if it is rank 0.

        Raises:
            OSError: the address cannot be listened on.
        """
        if comm.rank != min(peer.rank for peer in self.peers if peer.host == self.host):
            return None
        board = HostBoard(self.peers, awake=awake_since) if self.is_home else None
        end = Sender(self.address, self.key) if board is None else Listener(self.address, self.key, board.take)
        comm.observers += (HostSide(self.peers, comm.rank, page, end, board, say),)
        return board

    def send_home(self, text: str, diagnoses: Sequence[Diagnosis]) -> None:
        """Sends what a rank of this host has found wrong, and told as ``text``, to the host of rank 0, if that can be
        reached."""
        if self.is_home:
            return
        found = [(d.kind, d.rank, d.step) for d in diagnoses[:MOST_FOUND]]
        with contextlib.suppress(OSError), Sender(self.address, self.key) as sender:
            sender.send({"host": self.host, "ranks": [], "text": text[:MOST_TEXT], "found": found})


def parse_address(text: str) -> Address:
    """``10.0.0.5:29600`` or ``[fd00::1]:29600``."""
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{CHANNEL}='{one_line(text, 100)}' is no address: it is host:port of the host of rank 0")
    return host.removeprefix("[").removesuffix("]"), int(port)
