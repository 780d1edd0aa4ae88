"""``mailbox.py`` and ``alarm.py`` of ``plait.shared_memory``: semaphores, and plain accesses to slots."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from protocol_steps import Program, Step

Returns: TypeAlias = Generator[Step, Any, Any]


class Ring:
    """One end of a mailbox."""

    def __init__(self, records: int, writer: int, reader: int, mutant: str = "") -> None:
        self.records, self.next, self.mutant = records, 0, mutant
        self.pair, self.room, self.filled = (writer, reader), f"room{writer}{reader}", f"filled{writer}{reader}"

    def write(self, record: Any) -> Returns:
        if not (yield ("take", self.room)):
            return False
        place, self.next = self.next % self.records, self.next + 1
        if self.mutant == "posts before it writes":
            yield ("post", self.filled)
        yield ("store", "slot", *self.pair, place, record)
        if self.mutant != "posts before it writes":
            yield ("post", self.filled)
        return True

    def read(self) -> Returns:
        """``_drain`` of one record; None where nothing has come."""
        if not (yield ("take", self.filled)):
            return None
        place, self.next = self.next % self.records, self.next + 1
        if self.mutant == "gives room before it reads":
            yield ("post", self.room)
        record = yield ("load", "slot", *self.pair, place)
        if self.mutant != "gives room before it reads":
            yield ("post", self.room)
        return record


class Bell:
    """A rank's alarm."""

    def __init__(self, rank: int) -> None:
        self.asleep, self.bell = f"asleep{rank}", f"bell{rank}"

    def ring(self) -> Returns:
        if (yield ("take", self.asleep)):
            yield ("post", self.bell)

    def doze(self) -> Returns:
        yield ("post", self.asleep)

    def sleep(self) -> Returns:
        return (yield ("wait", self.bell))

    def wake(self) -> Returns:
        if not (yield ("take", self.asleep)):
            yield ("take", self.bell)


def writes(ring: Ring, count: int) -> Program:
    bell = Bell(ring.pair[1])
    for record in range(1, count + 1):
        while not (yield from ring.write(record)):
            yield ("nap",)
        yield from bell.ring()


def reads(rings: list[Ring], count: int) -> Program:
    """Takes ``count`` records out of each mailbox, and sleeps while there are none."""
    bell, due = Bell(rings[0].pair[1]), [1 for _ in rings]

    def look() -> Returns:
        found = False
        for place, ring in enumerate(rings):
            while (record := (yield from ring.read())) is not None:
                assert record == due[place], f"record {due[place]} is read as {record}"
                due[place] += 1
                found = True
        return found

    while min(due) <= count:
        if (yield from look()):
            continue
        yield from bell.doze()
        if rings[0].mutant == "sleeps without a last look" or not (yield from look()):
            yield from bell.sleep()
        yield from bell.wake()
