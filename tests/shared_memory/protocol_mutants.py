"""Faults of the protocol, each as a patch of the code."""

from typing import Any

import pytest
import torch

from plait.shared_memory.alarm import Alarm
from plait.shared_memory.common import CommonMemory
from plait.shared_memory.mailbox import READ, Mailbox, MailRecord
from plait.shared_memory.meeting import Adding, Copying, InPlace, Meeting
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
    pump = Meeting.pump

    def mutant(meeting: Meeting) -> None:
        while meeting._copied and len(meeting.read.silent(meeting._copied[0][0] + 1)) < len(meeting.others):
            meeting.mail.arena.free(meeting._copied.popleft()[1])
        pump(meeting)

    patch.setattr(Meeting, "pump", mutant)


def acknowledges_before_it_copies(patch: Patch) -> None:
    view, post = SharedMemoryTransport.view, SharedMemoryTransport.post

    def mutant(mail: SharedMemoryTransport, src: int, record: MailRecord, like: torch.Tensor) -> torch.Tensor:
        if record.nbytes:
            post(mail, src, record._replace(kind=READ))
        return view(mail, src, record, like)

    patch.setattr(SharedMemoryTransport, "view", mutant)
    patch.setattr(SharedMemoryTransport, "post", lambda mail, dst, one: one.kind == READ or post(mail, dst, one))


def reports_a_part_before_it_is_written(patch: Patch) -> None:
    write = Meeting._write

    def mutant(meeting: Meeting, one: InPlace) -> None:
        meeting.mail.ring(meeting.written.tell(meeting._put + 1))
        write(meeting, one)

    patch.setattr(Meeting, "_write", mutant)


def has_used_a_part_before_it_uses_it(patch: Patch) -> None:
    has_used = Meeting.has_used
    for kind in (Adding, Copying):

        def mutant(one: Any, part: int, come: Any, use: Any = kind.use) -> None:
            has_used(one._meeting)
            use(one, part, come)

        patch.setattr(kind, "use", mutant)
    patch.setattr(Meeting, "has_used", lambda meeting: None)


has_used_a_part_before_it_gives_the_sum_back = has_used_a_part_before_it_uses_it


def reports_no_part_as_used(patch: Patch) -> None:
    patch.setattr(Meeting, "has_used", lambda meeting: setattr(meeting, "used", meeting.used + 1))


def does_not_wait_for_readers(patch: Patch) -> None:
    def mutant(mail: SharedMemoryTransport) -> None:
        for memory in mail._common.values():
            memory.generation += 1

    patch.setattr(SharedMemoryTransport, "wait_for_readers", mutant)


def waits_for_the_generation_before(patch: Patch) -> None:
    silent = CommonMemory.silent
    patch.setattr(CommonMemory, "silent", lambda memory, generation: silent(memory, generation - 1))


def tells_and_does_not_ring(patch: Patch) -> None:
    patch.setattr(SharedMemoryTransport, "ring", lambda mail, ranks: None)
