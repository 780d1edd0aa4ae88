"""Collectives in place: each member writes down where its parts are, and the others read them there.

    member                                          each other member
    the place of part n -> its board; written  ──►  adds it, in the members' order, or copies it
    part n is its owner's again                ◄──  read

All members start a group's collectives in the same order, so entry n of every board is about the same part of the
same collective.  A tensor of ``Comm.empty`` is read where it is.  Another is copied into blocks, a few parts at a time,
so that blocks stay in cache; the rest follows whenever this rank waits for anything.  All members use part n of
everyone before part n + 1, so the slowest always finds its part.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.comm.operation import Group, Operation
from plait.comm.ordered_reduce import ordered_sum
from plait.shared_memory import semaphore
from plait.shared_memory.arena import SharedBlock
from plait.shared_memory.bells import Bells
from plait.shared_memory.mailbox import DATA, MailRecord
from plait.shared_memory.segment import Segment
from plait.shared_memory.semaphore import Semaphore

if TYPE_CHECKING:
    from plait.shared_memory.transport import SharedMemoryTransport

CHUNK_BYTES = 2**21
WINDOW = 2
"""The most parts in blocks, of a collective of several, that wait to be read."""

ENTRIES = 256
_FORMAT = struct.Struct("<Iiq")
BYTES = 3 * semaphore.SIZE + ENTRIES * _FORMAT.size
"""The bytes of a board for each member."""


class Board:
    """A member's entries for the others, and the bells between it and them; each process creates its own over the same
    memory."""

    def __init__(self, segment: Segment, offset: int, members: int) -> None:
        bells = [Semaphore(segment.address + offset + k * semaphore.SIZE) for k in range(3 * members)]
        self.written, self.common, self.read = bells[:members], bells[members : 2 * members], bells[2 * members :]
        """Reports of the board's owner to each member (of entries, and of common memory), and of each to the owner."""
        self._buffer, self._entries = segment.buffer, offset + len(bells) * semaphore.SIZE

    def write(self, member: int, number: int, meaning: int, place: tuple[int, int]) -> None:
        _FORMAT.pack_into(self._buffer, self._place(member, number), meaning, *place)

    def entry(self, member: int, number: int) -> MailRecord:
        """Returns the meaning of a part's collective, as a tag, and the part's place."""
        meaning, descriptor, offset = _FORMAT.unpack_from(self._buffer, self._place(member, number))
        return MailRecord(DATA, meaning, descriptor, offset)

    def _place(self, member: int, number: int) -> int:
        return self._entries + (member * ENTRIES + number % ENTRIES) * _FORMAT.size


class Meeting:
    """A group's collectives, seen from one of its ranks."""

    def __init__(self, mail: SharedMemoryTransport, group: Group) -> None:
        self.mail, self.group, self._boards = mail, group, dict[int, Board]()
        n, me = len(group.ranks), group.index
        self.others = {group.ranks[(me - step) % n]: (me - step) % n for step in range(1, n)}
        block = mail.arena.take(n * BYTES)
        self._board = board = Board(block.segment, block.offset, n)
        self._nothing = block.place
        for bell in board.written + board.common + board.read:
            bell.begin()
        self.written = Bells({r: board.written[k] for r, k in self.others.items()}, {}, self.others)
        self.common = Bells({r: board.common[k] for r, k in self.others.items()}, {}, self.others)
        self.read = Bells({}, {r: board.read[k] for r, k in self.others.items()}, self.others)
        self._tag = zlib.crc32(repr(("board", group.ranks)).encode()) & 0x7FFFFFFF
        for rank in self.others:
            mail.post(rank, MailRecord(DATA, self._tag, *self._nothing, n * BYTES))
        self.asked = self.put = self.used = 0
        """The parts of all collectives that were started, are on this board, and were used by this rank."""
        self.unsent = deque[InPlace]()
        """Collectives with parts that are not on the board yet."""
        self._copied = deque[tuple[int, SharedBlock]]()
        """Blocks on the board, each with the number of its entry."""

    def pump(self) -> None:
        """Frees what all have read, and writes further entries, as far as there is room."""
        while self._copied and not self.read.silent(self._copied[0][0] + 1):
            self.mail.arena.free(self._copied.popleft()[1])
        while self.unsent and not self.room_from(one := self.unsent[0]):
            self._write(one)
            if one.sent == one.count:
                self.unsent.popleft()

    def room_from(self, one: InPlace) -> list[int]:
        """Returns the ranks that must read before there is room for the next part of a collective."""
        return self.read.silent(self.put + 1 - (ENTRIES if one.lent or one.count == 1 else WINDOW))

    def _write(self, one: InPlace) -> None:
        arena, blocks = self.mail.arena, dict[int, SharedBlock]()
        for k in self.others.values():
            place = self._nothing
            if one.sent < len(one.slices[k]):
                part = one.slices[k][one.sent]
                home = arena.place(part) if one.lent else None
                if home is None and id(part) not in blocks:
                    blocks[id(part)] = arena.put(part, back=one.back)
                place = home or blocks[id(part)].place
            self._board.write(k, self.put, one.meaning, place)
        one.sent += 1
        self._copied += [(self.put, block) for block in blocks.values()]
        self.put += 1
        self.mail.ring(self.written.tell(self.put))

    def silent(self, number: int) -> list[int]:
        """Returns the ranks that have not written entry ``number`` yet."""
        if len(self._boards) < len(self.others):
            self._open()
        return self.written.silent(number + 1)

    def _open(self) -> None:
        n, me = len(self.group.ranks), self.group.index
        for rank in self.others.keys() - self._boards.keys():
            record = self.mail.take(rank, self._tag, n * BYTES)
            if record is not None:
                segment = self.mail.registry.segment(rank, record.descriptor)
                self._boards[rank] = board = Board(segment, record.offset, n)
                self.written.theirs[rank], self.common.theirs[rank] = board.written[me], board.common[me]
                self.read.mine[rank] = board.read[me]

    def entries(self, meaning: int) -> dict[int, MailRecord]:
        """Returns the others' next entries, by rank; empty if one is of another meaning, or its rank has ended."""
        found, me = dict[int, MailRecord](), self.group.index
        for rank in self.others:
            found[rank] = record = self._boards[rank].entry(me, self.used)
            if record.tag != meaning or not self.mail.can_open(rank, record.descriptor):
                return {}
        return found

    def has_used(self) -> None:
        """Reports that this rank does not need the others' next entries any more."""
        self.used += 1
        self.mail.ring(self.read.tell(self.used))


class InPlace:
    """A collective: others read this rank's ``slices``, one for each member, and this rank theirs.

    Args:
        lent: the slices may be read where they are until the collective is over.
        back: the others' results replace their slices.
    """

    use: Callable[[int, dict[int, MailRecord]], None]
    """Uses a part of all others, given its number and the places."""

    def __init__(
        self, meeting: Meeting, operation: Operation, slices: Sequence[Tensor], *, lent: bool, back: bool = False
    ) -> None:
        self.lent = lent and all(meeting.mail.arena.place(one) for one in slices)  # all, or none
        self.back, self.sent = back, 0
        cut: dict[int, Sequence[Tensor]] = {id(one): chunks(one) for one in slices}
        self.slices = [cut[id(one)] for one in slices]
        self.meaning, self.count = _checksum(operation.meaning), max(map(len, self.slices))
        self._meeting, self._start, self._used = meeting, 0, 0

    def begin(self) -> None:
        """Starts it; it may start again when it is complete."""
        meeting = self._meeting
        self.sent, self._used, self._start = 0, 0, meeting.asked
        meeting.asked += self.count
        if self.count:
            meeting.unsent.append(self)
            meeting.pump()

    def advance(self) -> bool:
        """Advances as far as it can without waiting; returns True when it is complete."""
        meeting = self._meeting
        if meeting.unsent:
            meeting.pump()
        while self._used < self.count:
            number = self._start + self._used
            if self._used == self.sent or meeting.used < number or meeting.silent(number):
                return False
            if not (come := meeting.entries(self.meaning)):
                return False
            self.use(self._used, come)
            self._used += 1
            meeting.has_used()
        if (self.lent or self.back) and meeting.read.silent(self._start + self.count):
            return False
        if self.back:  # the results are in blocks
            meeting.pump()
        return True

    def waits_for(self) -> list[int]:
        """Returns the ranks that must still do something, at least one until it is complete."""
        meeting = self._meeting
        if self._used == self.count:
            return meeting.read.silent(self._start + self.count)
        missing = meeting.silent(meeting.used) or (meeting.room_from(self) if self.sent <= self._used else [])
        return missing or [*meeting.others]


class Adding(InPlace):
    """Reduces every member's part and this rank's own, in the members' order, into ``out``; with ``back``, the sum is
    also written over the others' parts."""

    def __init__(
        self, meeting: Meeting, operation: Operation, slices: Sequence[Tensor], out: Tensor,
        *, lent: bool = True, back: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(meeting, operation, slices, lent=lent, back=back)
        self._mine, self._out, self._op = self.slices[operation.group.index], chunks(out), operation.op
        self._sizes = operation.group.sizes  # of this operation's axes: others may have the same ranks

    def use(self, part: int, come: dict[int, MailRecord]) -> None:
        if part >= len(self._mine):
            return
        group, mine, out, mail = self._meeting.group, self._mine[part], self._out[part], self._meeting.mail
        theirs = {src: mail.view(src, record, mine) for src, record in come.items()}
        stack = [mine if rank == group.rank else theirs[rank] for rank in group.ranks]
        ordered_sum(stack, self._sizes, self._op, out)
        for one in theirs.values() if self.back else ():
            one.copy_(out)


class Copying(InPlace):
    """Copies each member's slice for this rank into a slot."""

    def __init__(
        self, meeting: Meeting, operation: Operation, slices: Sequence[Tensor], slots: Sequence[Tensor]
    ) -> None:
        self._slots = {rank: chunks(slots[k]) for rank, k in meeting.others.items()}
        super().__init__(meeting, operation, slices, lent=True)

    def use(self, part: int, come: dict[int, MailRecord]) -> None:
        for src, record in come.items():
            slot = self._slots[src][part]
            slot.copy_(self._meeting.mail.view(src, record, slot))


def chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Splits a 1-D tensor into chunks; none if it is empty."""
    if tensor.nbytes <= CHUNK_BYTES:
        return (tensor,) if tensor.numel() else ()
    return torch.split(tensor, CHUNK_BYTES // tensor.element_size())


@lru_cache(4096)
def _checksum(meaning: tuple[object, ...]) -> int:
    return zlib.crc32(repr(meaning).encode())
