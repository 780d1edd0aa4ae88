"""A ring of records from one rank to another, in the reader's memory.

    writer                                      reader
    room.take()      or the ring is full        filled.take()     or nothing has come
    write record                                read record
    filled.post()                               room.post()

One process writes and one reads, so the semaphores alone order their accesses.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from plait.shared_memory import semaphore
from plait.shared_memory.segment import Segment
from plait.shared_memory.semaphore import Semaphore

RECORDS = 1024
_FORMAT = struct.Struct("<IIiQQ")
BYTES = 2 * semaphore.SIZE + RECORDS * _FORMAT.size
"""The bytes of a mailbox."""

DATA, READ, HERE, LEFT = range(4)
"""Kinds of news: a message is in a block; a block of yours was read; this rank opened the mailboxes; it has left."""


class MailRecord(NamedTuple):
    """One record: the kind of news, and the place of its data."""

    kind: int
    tag: int = 0
    descriptor: int = 0
    offset: int = 0
    nbytes: int = 0


class Mailbox:
    """One end of a mailbox: each process creates its own over the same memory."""

    def __init__(self, segment: Segment, offset: int) -> None:
        start = segment.address + offset
        self.room, self.filled = Semaphore(start), Semaphore(start + semaphore.SIZE)
        self._segment = segment
        self._start, self._next = offset + 2 * semaphore.SIZE, 0
        self._behind = RECORDS
        """The number of records that were written after the last message."""

    def begin(self) -> None:
        """Sets the mailbox up; the reader calls this before the writer knows of it."""
        self.room.begin(RECORDS)
        self.filled.begin()

    @property
    def delivered(self) -> bool:
        """True if the reader has taken all messages that this end has written."""
        return RECORDS - self.room.value <= self._behind

    def write(self, record: MailRecord) -> bool:
        """Writes a record; False if there is no room for it."""
        if not self.room.take():
            return False
        _FORMAT.pack_into(self._segment.buffer, self._place(), *record)
        self._behind = 0 if record.kind == DATA else self._behind + 1
        self.filled.post()
        return True

    def read(self) -> MailRecord:
        """Returns the next record, after ``filled`` was taken; the caller posts ``room`` after using the record."""
        return MailRecord(*_FORMAT.unpack_from(self._segment.buffer, self._place()))

    def _place(self) -> int:
        place = self._start + self._next % RECORDS * _FORMAT.size
        self._next += 1
        return place
