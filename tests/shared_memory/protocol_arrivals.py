"""``arrivals.py`` of ``plait.shared_memory``: as far as it can go without a wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from protocol_mailbox import Returns

if TYPE_CHECKING:
    from protocol_model import Outgoing, Rank, Record


class Arrival:
    """``Arrival``, of one rank."""

    me: Rank
    outgoing: list[Outgoing]

    def advance(self) -> Returns:
        raise NotImplementedError

    def waits_for(self) -> Returns:
        raise NotImplementedError

    def readers(self) -> list[int]:
        return [reader for one in self.outgoing if not one.is_over() for reader in one.waits_for()]


class Copying(Arrival):
    def __init__(self, me: Rank, slots: dict[int, list[int]], outgoing: list[Outgoing], tag: int) -> None:
        self.me, self.tag, self.outgoing = me, tag, outgoing
        self.slots = {src: deque(range(len(chunks))) for src, chunks in slots.items()}
        self.into = slots

    def advance(self) -> Returns:
        me = self.me
        for src in list(self.slots):
            while self.slots[src] and (record := me.take(src, self.tag)) is not None:
                place = self.slots[src].popleft()
                if me.mutant == "acknowledges before it copies":
                    yield from me.read(src, record)
                self.into[src][place] = yield ("load", *record[2])
                if me.mutant != "acknowledges before it copies":
                    yield from me.read(src, record)
            if not self.slots[src]:
                del self.slots[src]
        return not self.slots and all(one.is_over() for one in self.outgoing)

    def waits_for(self) -> Returns:
        return [*self.slots, *self.readers()]
        yield


class Adding(Arrival):
    def __init__(
        self, me: Rank, parts: list[int], into: list[int], outgoing: list[Outgoing], tag: int, *, back: bool
    ) -> None:
        self.me, self.parts, self.into, self.outgoing, self.tag, self.back = me, parts, into, outgoing, tag, back
        self.next = 0
        self.come: dict[int, Record] = {}

    def advance(self) -> Returns:
        while self.next < len(self.parts) and self.has_all():
            yield from self.add(self.next)
            self.next += 1
            self.come = {}
        return self.next == len(self.parts) and all(one.is_over() for one in self.outgoing)

    def has_all(self) -> bool:
        for src in self.me.others:
            if src not in self.come and (record := self.me.take(src, self.tag)) is not None:
                self.come[src] = record
        sent = all(one.lent or one.back or one.sent >= min(self.next + 1, one.count) for one in self.outgoing)
        return sent and len(self.come) == len(self.me.others)

    def add(self, place: int) -> Returns:
        total = self.parts[place]
        for record in self.come.values():
            total += yield ("load", *record[2])
        self.into[place] = total
        for src, record in self.come.items():
            if self.back and self.me.mutant != "acknowledges before it gives the sum back":
                yield ("store", *record[2], total)
            yield from self.me.read(src, record)
            if self.back and self.me.mutant == "acknowledges before it gives the sum back":
                yield ("store", *record[2], total)

    def waits_for(self) -> Returns:
        missing = [src for src in self.me.others if src not in self.come] if self.next < len(self.parts) else []
        return missing or self.readers()
        yield


class Hearing(Arrival):
    def __init__(self, me: Rank, generation: int) -> None:
        self.me, self.generation = me, generation

    def advance(self) -> Returns:
        return not (yield from self.waits_for())

    def waits_for(self) -> Returns:
        return (yield from self.me.silent(self.generation))
