"""Faults of the protocol, each as a patch of the code."""

from __future__ import annotations

import pytest
import torch

from plait.shared_memory import transport
from plait.shared_memory.alarm import Alarm
from plait.shared_memory.arena import Arena, SharedBlock
from plait.shared_memory.arrivals import Adding
from plait.shared_memory.common import CommonMemory
from plait.shared_memory.mailbox import Mailbox, MailRecord
from plait.shared_memory.transport import SharedMemoryTransport

Patch = pytest.MonkeyPatch


class Posted:
    """In place of a semaphore of a mailbox, until its next post, which was made before."""

    def __init__(self, box: Mailbox, which: str) -> None:
        self._box, self._which, self._own = box, which, getattr(box, which)
        setattr(box, which, self)

    def post(self) -> None:
        setattr(self._box, self._which, self._own)


def posts_before_it_writes(patch: Patch) -> None:
    place, write, writing = Mailbox._place, Mailbox.write, set[int]()

    def written(box: Mailbox, record: MailRecord) -> bool:
        writing.add(id(box))
        return write(box, record)

    def mutant(box: Mailbox) -> int:
        if id(box) in writing:
            box.filled.post()
            Posted(box, "filled")
        return place(box)

    patch.setattr(Mailbox, "write", written)
    patch.setattr(Mailbox, "_place", mutant)


def gives_room_before_it_reads(patch: Patch) -> None:
    read = Mailbox.read

    def mutant(box: Mailbox) -> MailRecord:
        box.room.post()
        Posted(box, "room")
        return read(box)

    patch.setattr(Mailbox, "read", mutant)


def sleeps_without_a_last_look(patch: Patch) -> None:
    sleep = Alarm.sleep
    patch.setattr(Alarm, "sleep", lambda alarm, found, seconds: sleep(alarm, lambda: False, seconds))


def frees_a_block_at_the_first_reader(patch: Patch) -> None:
    read = Arena.read

    def mutant(arena: Arena, number: int) -> SharedBlock:
        block = arena._under_way[number]
        if block.readers > 1 and not block.lent:
            arena._free.setdefault(block.size, []).append(SharedBlock(block.segment, block.offset, block.size))
            block.lent = True
        return read(arena, number)

    patch.setattr(Arena, "read", mutant)


def acknowledges_before_it_copies(patch: Patch) -> None:
    view, read = SharedMemoryTransport.view, SharedMemoryTransport.read

    def mutant(mail: SharedMemoryTransport, src: int, record: MailRecord, like: torch.Tensor) -> torch.Tensor:
        read(mail, src, record)
        return view(mail, src, record, like)

    patch.setattr(SharedMemoryTransport, "view", mutant)
    patch.setattr(SharedMemoryTransport, "read", lambda mail, src, record: None)


def acknowledges_before_it_gives_the_sum_back(patch: Patch) -> None:
    def mutant(adding: Adding, part: torch.Tensor, into: torch.Tensor) -> None:
        group = adding._operation.group
        come = {src: adding._mail.view(src, record, part) for src, record in adding._come.items()}
        into.copy_(sum(part if rank == group.rank else come[rank] for rank in group.ranks))
        for src, record in adding._come.items():
            adding._mail.read(src, record)
            come[src].copy_(into)

    patch.setattr(Adding, "_add", mutant)


def acknowledges_nothing(patch: Patch) -> None:
    patch.setattr(SharedMemoryTransport, "read", lambda mail, src, record: None)


def does_not_wait_for_readers(patch: Patch) -> None:
    def mutant(mail: SharedMemoryTransport) -> None:
        for memory in mail._common.values():
            memory.generation += 1

    patch.setattr(SharedMemoryTransport, "wait_for_readers", mutant)


def waits_for_the_generation_before(patch: Patch) -> None:
    silent = CommonMemory.silent
    patch.setattr(CommonMemory, "silent", lambda memory, generation: silent(memory, generation - 1))


def tells_and_does_not_ring(patch: Patch) -> None:
    patch.setattr(SharedMemoryTransport, "_tell_written", lambda mail, memory: memory.tell())


def says_who_has_left_before_it_looks(patch: Patch) -> None:
    patch.setattr(transport, "len", lambda some: 0 if isinstance(some, dict) else len(some), raising=False)
