"""Runs the code of ``plait.shared_memory`` in an order that a seed draws, one atomic step at a time.

The ranks are threads, and one of them runs at a time.  Before each call of a semaphore, each access to a slot of a
mailbox, each look at a message and each access to a piece of common memory, another rank may go on.  Clocks stand
still, and a sleep never ends by itself, so a missing bell is found as a standstill.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from plait.comm.failures import FailureReports
from plait.comm.operation import NO_NOTE, Group, Operation
from plait.comm.process_identity import Peer
from plait.shared_memory import mailbox, meeting, transport
from plait.shared_memory.mailbox import MailRecord
from plait.shared_memory.mailbox_registry import MailboxRegistry
from plait.shared_memory.semaphore import Semaphore
from plait.shared_memory.transport import SharedMemoryTransport

MOST_STEPS = 20_000

Mutate: TypeAlias = Callable[[pytest.MonkeyPatch], None]


class StuckError(Exception):
    """All ranks sleep, or they come to no end."""


class Turns:
    """Draws the rank that takes the next step."""

    def __init__(self, size: int, seed: int) -> None:
        self._random, self._gates = Random(seed), [threading.Semaphore(0) for _ in range(size)]
        self.running, self._asleep = set(range(size)), dict[int, Callable[[], bool]]()
        self._stuck, self._taken, self._halts, self._halted = "", 0, seed % 2 == 1, -1
        """Every other seed halts a rank for some 30 steps, then another: even turns meet too few orders."""

    def choose(self) -> None:
        ready = [rank for rank in sorted(self.running) if rank not in self._asleep or self._asleep[rank]()]
        self._taken += 1
        if not ready and self.running:
            self._stuck = "all ranks sleep"
        if self._taken > MOST_STEPS:
            self._stuck = "the ranks come to no end"
        if self._halts and self._random.random() < 1 / 30:
            self._halted = self._random.randrange(len(self._gates))
        ready = [rank for rank in ready if rank != self._halted] or ready
        for gate in self._gates if self._stuck else [self._gates[self._random.choice(ready)]] if ready else []:
            gate.release()

    def turn(self, rank: int, until: Callable[[], bool] = lambda: True) -> None:
        """Lets others go first, perhaps, and in any case until ``until()``."""
        self._asleep[rank] = until
        self.choose()
        self.enter(rank)

    def enter(self, rank: int) -> None:
        if not self._gates[rank].acquire(timeout=60) or self._stuck:
            raise StuckError(self._stuck or "a rank waits where no turn is taken")
        self._asleep.pop(rank, None)

    def end(self, rank: int) -> None:
        self.running.discard(rank)
        if not self._stuck:
            self.choose()


class Unreported(FailureReports):
    def error(self, operation: str, cause: BaseException, deadline: float, others: Any) -> OSError:
        return ConnectionError(f"{operation}: {cause}")


class PlayedRank:
    """A rank's transport, and one common memory."""

    def __init__(self, turns: Turns, rank: int, store: Any, peers: list[Peer]) -> None:
        self.rank, self.size, self._turns = rank, len(peers), turns
        comm: Any = SimpleNamespace(rank=rank, deadline=60.0, store=store, peers=(), waiting=lambda _: nullcontext())
        self.transport = SharedMemoryTransport(MailboxRegistry(rank, store, peers, float("inf")), comm)
        self.transport._spin, self.transport._reports = 0.0, Unreported(store, rank)
        group = Group(("shard",), tuple(range(self.size)), rank, (self.size,))
        self.operation = Operation("any", group, NO_NOTE, self.size, torch.float64, "sum")
        self.common = self.transport.common(self.operation)

    def wait(self, works: Any) -> None:
        self.transport.wait(self.operation, works)

    def wait_for_the_end_of(self, rank: int) -> None:
        self._turns.turn(self.rank, lambda: rank not in self._turns.running)

    def load(self, tensor: torch.Tensor) -> float:
        self._turns.turn(self.rank)
        return tensor.item()

    def store(self, tensor: torch.Tensor, value: float) -> None:
        self._turns.turn(self.rank)
        tensor.fill_(value)


def play(
    size: int, seed: int, body: Callable[[PlayedRank], None], mutate: Mutate = lambda patch: None
) -> dict[int, BaseException]:
    """Runs ``body`` on each rank and returns the errors by rank; the code is mutated once all ranks have met."""
    turns, store, barrier, errors = Turns(size, seed), dist.HashStore(), threading.Barrier(size), {}
    here = threading.local()
    peers = [Peer(rank, "a", os.getpid()) for rank in range(size)]

    def rank_main(rank: int) -> None:
        me = PlayedRank(turns, rank, store, peers)
        barrier.wait(60)
        me.transport._drain_all()
        if barrier.wait(60) == 0:
            mutate(patch)
        barrier.wait(60)
        here.rank = rank
        if barrier.wait(60) == 0:
            turns.choose()
        try:
            turns.enter(rank)
            body(me)
        except BaseException as error:
            errors[rank] = error
        finally:
            turns.end(rank)
            here.rank = None

    def turn(until: Callable[[], bool] = lambda: True) -> None:
        if getattr(here, "rank", None) is not None:
            turns.turn(here.rank, until)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as pool:
        _take_turns(patch, turn)
        list(pool.map(rank_main, range(size)))
    return errors


def _take_turns(patch: pytest.MonkeyPatch, turn: Callable[..., None]) -> None:
    """Makes each atomic step of the code take a turn first."""

    def first(call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*given: Any) -> Any:
            turn()
            return call(*given)

        return stepped

    take, count, wait = Semaphore.take, Semaphore.value.fget, Semaphore.wait
    view = SharedMemoryTransport.view

    def waited(one: Semaphore, seconds: float) -> bool:
        turn(lambda: count(one) > 0)
        return take(one) or wait(one, 0.0)

    def viewed(mail: SharedMemoryTransport, src: int, record: MailRecord, like: torch.Tensor) -> torch.Tensor:
        found = view(mail, src, record, like)
        turn()
        return found

    patch.setattr(Semaphore, "post", first(Semaphore.post))
    patch.setattr(Semaphore, "take", first(take))
    patch.setattr(Semaphore, "wait", waited)
    patch.setattr(Semaphore, "value", property(first(count)))
    patch.setattr(SharedMemoryTransport, "view", viewed)
    for module in (mailbox, meeting):
        form = module._FORMAT
        slots = SimpleNamespace(size=form.size, pack_into=first(form.pack_into), unpack_from=first(form.unpack_from))
        patch.setattr(module, "_FORMAT", slots)
    still = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=lambda: 0.0, sleep=lambda seconds: turn())
    patch.setattr(transport, "time", still)
    patch.setattr(transport, "clock", still.monotonic)
    patch.setattr(transport, "WHOLE_BYTES", 0)
    patch.setattr(meeting, "CHUNK_BYTES", 8)
