"""The meeting place of threads: numbered barriers and mailboxes under one lock.

    rank 0   meet #4 ---- waits --------------------------------------------+    go on
                                                                            |
    rank 1   meet #4, the last: moves the tensors of all members  ----------+    go on

Every wait ends: the others come, the deadline passes, a member has returned for good, or a failing rank aborts.  The
first rank that notices writes the reason into the barrier for all that come later.  At a deadline it reports the stacks
of the ranks that did not come: threads of one process can see each other's stacks.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from torch import Tensor

from plait.comm.base import MismatchError, Operation
from plait.comm.texts import named

Address = tuple[int, int, str, int]
"""A message's sender, receiver, purpose, and number among such messages."""

PIECES = 20  # in which a rank divides its wait for a deadline
FRAMES = 12  # the number of calls of a rank's stack that are shown, innermost last


class AbortedError(RuntimeError):
    """Another rank failed, so this one stopped waiting for it."""


Brought = tuple[Tensor | None, ...]
"""The tensors that one member brings to a collective."""


@dataclass
class _Barrier:
    operation: Operation  # as requested by the rank that came first
    changed: threading.Condition
    brought: dict[int, Brought] = field(default_factory=dict)  # by rank
    over: bool = False
    failure: str = ""  # why it cannot take place; every rank that comes raises it
    kind: type[Exception] = RuntimeError


class Rendezvous:
    """The shared state of one world's ranks: barriers, mailboxes, and the first failure."""

    def __init__(self, num_ranks: int, deadline: float) -> None:
        self.deadline = deadline
        self._lock = threading.Lock()
        self._barriers: dict[tuple[tuple[int, ...], int], _Barrier] = {}
        self._mail: dict[Address, Tensor] = {}
        self._posted = [threading.Condition(self._lock) for _ in range(num_ranks)]
        self._threads: dict[int, int] = {}
        self._ended: set[int] = set()
        self._aborted = ""

    def begin(self, rank: int) -> None:
        """Registers the calling thread as the rank."""
        with self._lock:
            self._threads[rank] = threading.get_ident()

    def abort(self, why: str) -> None:
        """Makes every wait, now and later, raise AbortedError."""
        with self._lock:
            self._aborted = self._aborted or why
            self._wake()

    def end(self, rank: int) -> None:
        """Notes that a rank has returned and will come to no more barriers."""
        with self._lock:
            self._ended.add(rank)
            self._wake()

    def _wake(self) -> None:
        for changed in (*(barrier.changed for barrier in self._barriers.values()), *self._posted):
            changed.notify_all()

    def meet(
        self, number: int, operation: Operation, mine: Brought, move: Callable[[Operation, list[Brought]], None]
    ) -> None:
        """Returns once all members have come and the last of them has moved their tensors, given in group order."""
        ranks, rank = operation.group.ranks, operation.group.rank
        key = (tuple(sorted(ranks)), number)
        with self._lock:
            self._raise_if_aborted(operation)
            barrier = self._barriers.setdefault(key, _Barrier(operation, threading.Condition(self._lock)))
            if barrier.operation.meaning != operation.meaning:
                both = f"rank {barrier.operation.group.rank} is in {barrier.operation}, rank {rank} in {operation}"
                order = "members of a group must call the same, in one order (every layer runs on every rank)"
                self._fail(barrier, MismatchError, f"{both}: {order}")
            self._raise(barrier)
            barrier.brought[rank] = mine
            if len(barrier.brought) < len(ranks):
                self._await_others(operation, barrier)
                return
        try:
            move(operation, [barrier.brought[r] for r in ranks])
        except BaseException as error:
            with self._lock:
                self._fail(barrier, AbortedError, f"rank {rank} failed in {operation}: {error}")
            raise
        with self._lock:
            del self._barriers[key]
            barrier.over = True
            barrier.brought.clear()  # a member that wakes late keeps no other's tensors alive
            barrier.changed.notify_all()

    def _wait(self, changed: threading.Condition, settled: Callable[[], object]) -> bool:
        """Waits until ``settled()``; returns False after the deadline.

        Only time in which a rank could come counts.  Python's collector, a library call that keeps the interpreter, or
        a stop of the process halts all ranks; a rank that wakes too late only counts its intended sleep.
        """
        left = self.deadline
        while not settled():
            if left <= 0:
                return False
            piece, start = min(left, self.deadline / PIECES), time.monotonic()
            changed.wait(piece)
            left -= min(piece, time.monotonic() - start)
        return True

    def _await_others(self, operation: Operation, barrier: _Barrier) -> None:
        rank, members, brought = operation.group.rank, set(operation.group.ranks), barrier.brought

        def settled() -> object:
            return barrier.over or barrier.failure or self._aborted or (members - brought.keys()) & self._ended

        in_time = self._wait(barrier.changed, settled)
        if barrier.over:
            return
        self._raise(barrier)
        self._raise_if_aborted(operation)
        missing = [r for r in operation.group.ranks if r not in brought]
        if in_time:
            gone = named([r for r in missing if r in self._ended])
            self._fail(barrier, RuntimeError, f"rank {rank} is in {operation}, but {gone} returned without it")
        elif missing:
            text = f"rank {rank} waited {self.deadline:g} s in {operation}: {named(missing)} did not come"
            self._fail(barrier, TimeoutError, text + self._elsewhere(brought))
        else:
            raise TimeoutError(f"rank {rank} waited {self.deadline:g} s for others to finish {operation}")
        self._raise(barrier)

    def _fail(self, barrier: _Barrier, kind: type[Exception], text: str) -> None:
        if not barrier.failure:
            barrier.failure, barrier.kind = text, kind
            barrier.changed.notify_all()

    def _raise(self, barrier: _Barrier) -> None:
        if barrier.failure:
            raise barrier.kind(barrier.failure)

    def _raise_if_aborted(self, operation: Operation) -> None:
        if self._aborted:
            raise AbortedError(f"rank {operation.group.rank} stopped in {operation}, because {self._aborted}")

    def post(self, operation: Operation, tensor: Tensor, key: Address) -> None:
        """Puts a copy of ``tensor`` into the mailbox."""
        dst = key[1]
        with self._lock:
            self._raise_if_aborted(operation)
            self._mail[key] = tensor.clone()
            self._posted[dst].notify_all()

    def take(self, operation: Operation, key: Address) -> Tensor:
        """Waits for the message with that address, which ``operation`` needs."""
        src, dst = key[:2]
        with self._lock:
            settled = lambda: key in self._mail or self._aborted or src in self._ended  # noqa: E731
            in_time = self._wait(self._posted[dst], settled)
            message = self._mail.pop(key, None)
            if message is None:
                self._raise_if_aborted(operation)
                if in_time:
                    raise RuntimeError(f"rank {dst} is in {operation}, but rank {src} returned without sending")
                waited = f"rank {dst} waited {self.deadline:g} s in {operation}"
                raise TimeoutError(f"{waited}: rank {src} did not send{self._elsewhere((dst,))}")
        return message

    def _elsewhere(self, here: Container[int]) -> str:
        """The stacks of the ranks other than ``here``."""
        text, frames = "", sys._current_frames()
        for rank, thread in sorted(self._threads.items()):
            if rank not in here and thread in frames:
                inside = "".join(f" in {m.operation}," for m in self._barriers.values() if rank in m.brought)
                stack = traceback.format_list(traceback.extract_stack(frames[thread], FRAMES))
                text += f"\nrank {rank} is{inside} at\n{''.join(stack).rstrip()}"
        return text
