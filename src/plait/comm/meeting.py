"""Where threads meet: numbered rendezvous and mailboxes under one lock.

    rank 0   meet #4 ---+            body: read all, write my share ---+           go on
                        |  all here                                    |  all done
    rank 1   meet #4 ---+            body: read all, write my share ---+           go on

Every wait ends: by the others coming, by the deadline, by a member that has returned for good, or by the
abort that a failing rank sets off.  Whoever notices first writes the reason into the meeting, and every
member that comes later reads the same reason.

Where it is the deadline, the reason says what the ranks that did not come were doing: threads of one process can look
at each other's stacks.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from plait.comm.base import Call, MismatchError

PIECES = 20
"""In so many pieces a rank waits out its deadline."""
FRAMES = 12
"""How many calls of a rank's stack are shown, the innermost last."""


class AbortedError(RuntimeError):
    """Another rank failed, so this one stopped waiting for it."""


@dataclass
class _Meeting:
    first: int
    """The rank that came first, and what it meant."""
    call: Call
    changed: threading.Condition
    brought: dict[int, Tensor | None] = field(default_factory=dict)
    """What each rank laid down."""
    left: int = 0
    failure: str = ""
    """Why this meeting cannot take place; told to every rank that comes."""
    kind: type[Exception] = RuntimeError


class MeetingPlace:
    """What the ranks of one world share: meetings, mailboxes and the news that one of them has failed."""

    def __init__(self, num_ranks: int, deadline: float) -> None:
        self.deadline = deadline
        self._lock = threading.Lock()
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._mail: dict[tuple[int, int, int], Tensor] = {}
        self._posted = [threading.Condition(self._lock) for _ in range(num_ranks)]
        self._threads: dict[int, int] = {}
        self._ended: set[int] = set()
        self._aborted = ""

    def begin(self, rank: int) -> None:
        """Says that the calling thread is the rank."""
        with self._lock:
            self._threads[rank] = threading.get_ident()

    def abort(self, why: str) -> None:
        """Makes every wait, now and later, raise AbortedError."""
        with self._lock:
            self._aborted = self._aborted or why
            self._wake()

    def end(self, rank: int) -> None:
        """Says that a rank has returned and will come to no meeting any more."""
        with self._lock:
            self._ended.add(rank)
            self._wake()

    def _wake(self) -> None:
        for meeting in self._meetings.values():
            meeting.changed.notify_all()
        for posted in self._posted:
            posted.notify_all()

    @contextmanager
    def meet(self, rank: int, number: int, call: Call, mine: Tensor | None) -> Iterator[list[Tensor | None]]:
        """Yields what the members brought, in group order; all stay until the body has run everywhere."""
        ranks = call.group.ranks
        key = (tuple(sorted(ranks)), number)
        with self._lock:
            self._raise_if_aborted(rank, call)
            meeting = self._meetings.get(key)
            if meeting is None:
                meeting = _Meeting(rank, call, threading.Condition(self._lock))
                self._meetings[key] = meeting
            if not meeting.failure and meeting.call.meaning != call.meaning:
                both = f"rank {meeting.first} is in {meeting.call}, rank {rank} in {call}"
                why = f"{both}: members of a group must call the same, in one order"
                self._fail(meeting, MismatchError, why)
            meeting.brought[rank] = mine
            if len(meeting.brought) == len(ranks):
                meeting.changed.notify_all()
            self._await_members(rank, call, meeting)
        try:
            yield [meeting.brought[r] for r in ranks]
        except BaseException as error:
            with self._lock:
                self._fail(meeting, AbortedError, f"rank {rank} failed in {call}: {error}")
            raise
        with self._lock:
            meeting.left += 1
            if meeting.left == len(ranks):
                del self._meetings[key]
                meeting.changed.notify_all()
            everyone_left = lambda: meeting.left == len(ranks) or meeting.failure or self._aborted  # noqa: E731
            in_time = self._wait(meeting.changed, everyone_left)
            if meeting.left < len(ranks):
                if not in_time:
                    raise TimeoutError(f"rank {rank} waited {self.deadline:g} s for others to finish {call}")
                self._raise(meeting)
                self._raise_if_aborted(rank, call)

    def _wait(self, changed: threading.Condition, settled: Callable[[], object]) -> bool:
        """Waits until ``settled()``, or says False after the deadline.

        It counts the time in which somebody could come.  While Python's collector runs, or a library call that holds
        the interpreter, or the process is stopped, all ranks stand still; who waits then wakes far too late, and counts
        the piece of its deadline that it meant to sleep.
        """
        left = self.deadline
        while not settled():
            if left <= 0:
                return False
            piece, start = min(left, self.deadline / PIECES), time.monotonic()
            changed.wait(piece)
            left -= min(piece, time.monotonic() - start)
        return True

    def _await_members(self, rank: int, call: Call, meeting: _Meeting) -> None:
        ranks = call.group.ranks

        def settled() -> bool:
            if len(meeting.brought) == len(ranks) or meeting.failure or self._aborted:
                return True
            return any(r in self._ended and r not in meeting.brought for r in ranks)

        computed = time.process_time()
        in_time = self._wait(meeting.changed, settled)
        self._raise(meeting)
        if len(meeting.brought) == len(ranks):
            return
        self._raise_if_aborted(rank, call)
        missing = _list(r for r in ranks if r not in meeting.brought)
        if in_time:
            gone = _list(r for r in ranks if r not in meeting.brought and r in self._ended)
            text = f"rank {rank} is in {call}, but {gone} returned without it"
        else:
            text = f"rank {rank} waited {self.deadline:g} s in {call}: {missing} did not come"
            text += self._elsewhere(meeting.brought, computed)
        self._fail(meeting, RuntimeError if in_time else TimeoutError, text)
        self._raise(meeting)

    def _fail(self, meeting: _Meeting, kind: type[Exception], text: str) -> None:
        if not meeting.failure:
            meeting.failure, meeting.kind = text, kind
            meeting.changed.notify_all()

    def _raise(self, meeting: _Meeting) -> None:
        if meeting.failure:
            raise meeting.kind(meeting.failure)

    def _raise_if_aborted(self, rank: int, call: Call) -> None:
        if self._aborted:
            raise AbortedError(f"rank {rank} stopped in {call}, because {self._aborted}")

    def post(self, call: Call, tensor: Tensor, number: int) -> None:
        """Puts a copy of ``tensor`` into the mailbox."""
        src, dst = call.group.ranks
        with self._lock:
            self._raise_if_aborted(src, call)
            self._mail[src, dst, number] = tensor.clone()
            self._posted[dst].notify_all()

    def take(self, call: Call, number: int) -> Tensor:
        """Waits for the message of that number."""
        src, dst = call.group.ranks
        key = (src, dst, number)
        with self._lock:
            settled = lambda: key in self._mail or self._aborted or src in self._ended  # noqa: E731
            computed = time.process_time()
            in_time = self._wait(self._posted[dst], settled)
            message = self._mail.pop(key, None)
            if message is None:
                self._raise_if_aborted(dst, call)
                if in_time:
                    raise RuntimeError(f"rank {dst} is in {call}, but rank {src} returned without sending")
                waited = f"rank {dst} waited {self.deadline:g} s in {call}"
                raise TimeoutError(f"{waited}: rank {src} did not send{self._elsewhere((dst,), computed)}")
        return message

    def _elsewhere(self, here: Container[int], computed: float) -> str:
        """How much the process computed since, and where the ranks that are not ``here`` stand: their stacks."""
        text = f" (this process computed {time.process_time() - computed:.2f} s meanwhile)"
        frames = sys._current_frames()
        for rank, thread in sorted(self._threads.items()):
            if rank not in here and thread in frames:
                met = [str(m.call) for m in self._meetings.values() if rank in m.brought]
                stack = traceback.format_list(traceback.extract_stack(frames[thread], FRAMES))
                text += f"\nrank {rank} stands{''.join(f' in {call},' for call in met)} at\n{''.join(stack).rstrip()}"
        return text


def _list(ranks: Iterator[int]) -> str:
    found = list(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
