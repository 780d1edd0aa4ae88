"""Real runs of ``plait.shared_memory``, one step after the other, in an order that chance or a script chooses.

The ranks are threads, one of which runs at a time.  In front of each call of a semaphore, each access to a slot of a
mailbox, each look at a message and each access to a piece of common memory, another may go on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from protocol_steps import Step

from plait.comm.failures import FailureReports
from plait.comm.operation import NO_NOTE, Group, Operation
from plait.comm.process_identity import Peer
from plait.comm.transport import Wires
from plait.shared_memory import mailbox, outgoing, semaphore, transport
from plait.shared_memory.mailbox import DATA, READ, MailRecord
from plait.shared_memory.mailbox_registry import MailboxRegistry
from plait.shared_memory.semaphore import Semaphore
from plait.shared_memory.transport import SharedMemoryTransport

MOST_STEPS = 20_000


Script: TypeAlias = Sequence[tuple[int, Step | None]]
"""A rank goes on until it has done a step, or to its end; then the next."""


Mutate: TypeAlias = Callable[[pytest.MonkeyPatch], None]


class Stuck(Exception):  # noqa: N818
    """All ranks sleep, or go round for ever."""


class Turns:
    """Which of the ranks runs: chance says so, after what a script says."""

    def __init__(self, size: int, seed: int, script: Script) -> None:
        self._random, self._gates = Random(seed), [threading.Semaphore(0) for _ in range(size)]
        self._script = list(script)
        self._running, self._asleep = set(range(size)), dict[int, Callable[[], bool]]()
        self._stuck, self._taken = "", 0

    def _choose(self) -> None:
        ready = [rank for rank in sorted(self._running) if rank not in self._asleep or self._asleep[rank]()]
        self._taken += 1
        if not ready and self._running:
            self._stuck = "all ranks sleep"
        if self._taken > MOST_STEPS:
            self._stuck = "the ranks come to no end"
        for gate in self._gates if self._stuck else [self._gates[self._next(ready)]] if ready else []:
            gate.release()

    def _next(self, ready: list[int]) -> int:
        script = self._script
        return script[0][0] if script and script[0][0] in ready else self._random.choice(ready)

    def did(self, rank: int, step: Step | None) -> None:
        if self._script and self._script[0] == (rank, step):
            self._script.pop(0)

    def begin(self, rank: int, barrier: threading.Barrier) -> None:
        if barrier.wait(60) == 0:
            self._choose()
        self._enter(rank)

    def turn(self, rank: int, until: Callable[[], bool] = lambda: True) -> None:
        """Lets others go first, perhaps, and then until ``until``."""
        self._asleep[rank] = until
        self._choose()
        self._enter(rank)

    def _enter(self, rank: int) -> None:
        if not self._gates[rank].acquire(timeout=60) or self._stuck:
            self._running.discard(rank)
            raise Stuck(self._stuck or "a rank waits outside of what is traced")
        self._asleep.pop(rank, None)

    def end(self, rank: int) -> None:
        self._running.discard(rank)
        self.did(rank, None)
        if not self._stuck:
            self._choose()


class Unreported(FailureReports):
    def error(self, operation: str, cause: BaseException, deadline: float, others: Sequence[int]) -> OSError:
        return ConnectionError(f"{operation}: {cause}")


class Traced:
    """A rank's transport, and what its program touches."""

    def __init__(self, run: Run, rank: int, store: Any, peers: Sequence[Peer]) -> None:
        self.rank, self.size, self._run = rank, len(peers), run
        wires = Wires(rank, 60.0, Unreported(store, rank), lambda operation: nullcontext())
        self.transport = SharedMemoryTransport(MailboxRegistry(rank, store, peers, float("inf")), wires)
        self.transport._spin = 0.0
        group = Group(("shard",), tuple(range(self.size)), rank, (self.size,))
        self.operation = Operation("any", group, NO_NOTE, self.size, torch.float64, "sum")
        self.common = self.transport.common(self.operation)

    def settle(self) -> None:
        """What was told to make it is over; it starts as the model does."""
        self.transport._drain_all()
        boxes = [*self.transport._registry.inboxes.values(), *self.transport._registry.outboxes.values()]
        for box in boxes:
            box._next = box._behind = 0
        while self.transport._registry.alarm._asleep.take() or self.transport._registry.alarm._bell.take():
            pass
        self.transport._arena._free.clear()
        self.transport._arena._number = 0

    def wait(self, works: Any) -> None:
        self.transport.wait(self.operation, works)

    def load(self, tensor: torch.Tensor, *cell: Any) -> float:
        self._run.turns.turn(self.rank)
        self._run.note(self.rank, ("load", *cell), value := tensor.item())
        return value

    def store(self, tensor: torch.Tensor, value: float, *cell: Any) -> None:
        self._run.turns.turn(self.rank)
        tensor.fill_(value)
        self._run.note(self.rank, ("store", *cell, value), None)


class Run:
    """What ranks do, each step in its turn: ``trace`` has the rank, the step, its outcome, and what a message has."""

    def __init__(self, size: int, seed: int, script: Script) -> None:
        self.size, self.turns, self.active = size, Turns(size, seed, script), False
        self.trace: list[tuple[int, Step, Any, Any]] = []
        self.errors: dict[int, BaseException] = {}
        self.ranks: dict[int, Traced] = {}
        self._here = threading.local()
        self._names: dict[int, Step] = {}
        """Semaphores, by their addresses."""
        self._boxes: dict[int, int] = {}
        """Whose mailboxes a buffer has."""
        self._sent: dict[tuple[int, int], tuple[int, int]] = {}
        """Where messages lie: by rank and number."""

    def play(self, body: Callable[[Traced], None], mutate: Mutate) -> None:
        store, barrier = dist.HashStore(), threading.Barrier(self.size)
        peers = [Peer(rank, "a", os.getpid()) for rank in range(self.size)]

        def rank_main(rank: int) -> None:
            me = self.ranks[rank] = Traced(self, rank, store, peers)
            barrier.wait(60)
            me.settle()
            if barrier.wait(60) == 0:
                self._name()
                mutate(patch)
                self.active = True
            self._here.rank = rank
            self.turns.begin(rank, barrier)
            try:
                body(me)
            except BaseException as error:
                self.errors[rank] = error
            finally:
                self.turns.end(rank)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(self.size) as pool:
            self._patch(patch)
            list(pool.map(rank_main, range(self.size)))
            self.active = False

    def note(self, rank: int, step: Step, outcome: Any, content: Any = None) -> None:
        self.trace.append((rank, step, outcome, content))
        self.turns.did(rank, step)

    def _name(self) -> None:
        for rank, traced in self.ranks.items():
            registry = traced.transport._registry
            self._boxes[id(registry._mine.buffer)] = rank
            for pairs, boxes in ((False, registry.inboxes), (True, registry.outboxes)):
                for other, box in boxes.items():
                    pair = f"{rank}{other}" if pairs else f"{other}{rank}"
                    self._names[box.room._address] = (f"room{pair}",)
                    self._names[box.filled._address] = (f"filled{pair}",)
                    self._boxes[id(box._segment.buffer)] = other if pairs else rank
            for other, alarm in {**registry.alarms, rank: registry.alarm}.items():
                self._names[alarm._asleep._address] = (f"asleep{other}",)
                self._names[alarm._bell._address] = (f"bell{other}",)
            for memory in traced.transport._common.values():
                self._names |= {bell._address: ("told", other) for other, bell in memory._mine.items()}
                self._names |= {bell._address: ("heard", other) for other, bell in memory._theirs.items()}

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        post, take, wait, value = Semaphore.post, Semaphore.take, Semaphore.wait, Semaphore.value.fget
        view, form = SharedMemoryTransport.view, mailbox._FORMAT

        def name(one: Semaphore, kind: str) -> Step:
            found = self._names[one._address]
            return found if found[0] in ("told", "heard") else (kind, *found)

        def posted(one: Semaphore) -> None:
            if self.active:
                self.turns.turn(rank := self._here.rank)
                self.note(rank, name(one, "post"), None)
            post(one)

        def taken(one: Semaphore) -> bool:
            if not self.active:
                return take(one)
            self.turns.turn(rank := self._here.rank)
            self.note(rank, name(one, "take"), found := take(one))
            return found

        def waited(one: Semaphore, seconds: float) -> bool:
            if not self.active:
                return wait(one, seconds)
            self.turns.turn(rank := self._here.rank, lambda: value(one) > 0)
            self.note(rank, name(one, "wait"), found := take(one))
            return found

        def counted(one: Semaphore) -> int:
            if self.active:
                self.turns.turn(rank := self._here.rank)
                self.note(rank, name(one, "value"), value(one))
            return value(one)

        def viewed(mine: SharedMemoryTransport, src: int, record: MailRecord, like: torch.Tensor) -> torch.Tensor:
            found = view(mine, src, record, like)
            if self.active:
                self.turns.turn(mine.rank)
                self.note(mine.rank, ("load", src, (record.descriptor, record.offset)), found[0].item())
            return found

        def packed(buffer: Any, start: int, *values: Any) -> None:
            if self.active:
                self.turns.turn(rank := self._here.rank)
                slot, record = self._slot(buffer, start), record_of(values)
                self.note(rank, ("store", *slot, record), None, self._content(slot[2], rank, record))
            form.pack_into(buffer, start, *values)

        def unpacked(buffer: Any, start: int) -> tuple[Any, ...]:
            if not self.active:
                return form.unpack_from(buffer, start)
            self.turns.turn(rank := self._here.rank)
            values = form.unpack_from(buffer, start)
            self.note(rank, ("load", *self._slot(buffer, start)), record_of(values))
            return values

        def nap(seconds: float) -> None:
            if self.active:
                self.turns.turn(rank := self._here.rank)
                self.note(rank, ("nap",), None)

        patch.setattr(Semaphore, "post", posted)
        patch.setattr(Semaphore, "take", taken)
        patch.setattr(Semaphore, "wait", waited)
        patch.setattr(Semaphore, "value", property(counted))
        patch.setattr(SharedMemoryTransport, "view", viewed)
        size = form.size
        patch.setattr(mailbox, "_FORMAT", SimpleNamespace(size=size, pack_into=packed, unpack_from=unpacked))
        still = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=lambda: 0.0, sleep=nap)
        patch.setattr(transport, "time", still)
        patch.setattr(transport, "clock", still.monotonic)
        patch.setattr(transport, "WHOLE_BYTES", 0)
        patch.setattr(outgoing, "CHUNK_BYTES", 8)

    def _slot(self, buffer: Any, start: int) -> tuple[str, int, int, int]:
        writer, inside = divmod(start, mailbox.BYTES)
        return "slot", writer, self._boxes[id(buffer)], (inside - 2 * semaphore.SIZE) // mailbox._FORMAT.size

    def _content(self, reader: int, writer: int, record: tuple[Any, ...]) -> float | None:
        """The first element of the message that a record tells of."""
        if record[0] == DATA:
            owner, (descriptor, offset) = writer, record[2]
            self._sent[owner, record[3]] = record[2]
        elif record[0] == READ:
            owner, (descriptor, offset) = reader, self._sent[reader, record[1]]
        else:
            return None
        segments = self.ranks[owner].transport._arena._segments
        (segment,) = (one for one in segments if one.descriptor == descriptor)
        return segment.view(offset, 1, torch.float64).item()


def record_of(values: tuple[Any, ...]) -> tuple[Any, ...]:
    tag, kind, _, number, descriptor, offset, _ = values
    if kind == DATA:
        return kind, tag, (descriptor, offset), number
    return (kind, number) if kind == READ else (kind,)


def played(
    size: int, seed: int, body: Callable[[Traced], None], script: Script = (), mutate: Mutate = lambda patch: None
) -> Run:
    """The steps of a run; the code is mutated where its ranks have met."""
    run = Run(size, seed, script)
    run.play(body, mutate)
    return run
