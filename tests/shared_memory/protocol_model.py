"""What a rank does in the protocol of ``plait.shared_memory``: ``transport.py`` and its parts, without memory.

    Rank     mailboxes, alarms and semaphores are single steps; ``protocol_mailbox.py`` shows that they may be
    Fine     the same down to each semaphore: what a real run does, step by step (``protocol_replay.py``)
    Swift    the same with fewer places, for three ranks

Methods have the names and the order of those they model.  Tensors are lists of numbers, one for each chunk.  A rank
with a ``mutant`` has that fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from protocol_arrivals import Adding, Arrival, Copying, Hearing
from protocol_mailbox import Bell, Returns, Ring

from plait.shared_memory.mailbox import DATA, LEFT, READ
from plait.shared_memory.outgoing import WINDOW

Record: TypeAlias = tuple[Any, ...]
"""A kind, and what it tells: of a message its tag, where it lies and its number; of what was read its number."""


class Block:
    """``SharedBlock``."""

    def __init__(self, cell: tuple[Any, ...], lent: bool) -> None:
        self.cell, self.lent = cell, lent
        self.number = self.readers = 0
        self.outgoing: Outgoing | None = None
        self.source: tuple[list[int], int] | None = None


class Outgoing:
    def __init__(self, chunks: list[int], readers: Sequence[int], tag: int, lent: Sequence[Any], back: bool) -> None:
        self.chunks, self.readers, self.tag, self.back = chunks, tuple(readers), tag, back
        self.cells, self.lent = tuple(lent), bool(lent)
        self.count, self.sent, self.unread = len(chunks), 0, dict.fromkeys(readers, 0)
        self.pumping = False

    def is_over(self) -> bool:
        return self.sent >= self.count and not ((self.lent or self.back) and self.waits_for())

    def may_go_on(self) -> bool:
        return self.sent < self.count and (self.lent or max(self.unread.values()) < WINDOW)

    def waits_for(self) -> list[int]:
        return [reader for reader, unread in self.unread.items() if unread]


class Rank:
    """``SharedMemoryTransport`` of one rank of ``size``, with its ``Arena`` and one ``CommonMemory``."""

    def __init__(self, rank: int, size: int, mutant: str = "") -> None:
        self.rank, self.size, self.mutant = rank, size, mutant
        self.others = tuple(r for r in range(size) if r != rank)
        self.early: dict[tuple[int, int], list[Record]] = {}
        self.gone: list[int] = []
        self.behind = dict.fromkeys(self.others, 0)
        self.under_way: list[Arrival] = []
        self.unsent: list[Outgoing] = []
        self.blocks, self.free = 0, list[Block]()
        self.blocks_under_way: dict[int, Block] = {}
        self.number = 0
        self.generation, self.told, self.settled = 1, 0, 0  # one memory was made
        self.heard = dict.fromkeys(self.others, 0)

    def exchange(self, tag: int, slots: list[list[int]], slices: list[list[int]], lent: Any = ()) -> Returns:
        outgoing = yield from self.send(self.sliced(slices, tag, lent))
        order = [(self.rank - step) % self.size for step in range(1, self.size)]
        arrival = Copying(self, {k: slots[k] for k in order}, outgoing, tag)
        self.under_way.append(arrival)
        return arrival

    def all_reduce(self, tag: int, slices: list[list[int]], lent: Any = ()) -> Returns:
        outgoing = yield from self.send(self.sliced(slices, tag, lent, back=True))
        arrival = Adding(self, slices[self.rank], slices[self.rank], outgoing, tag, back=True)
        self.under_way.append(arrival)
        return arrival

    def reduce(self, tag: int, slices: list[list[int]], out: list[int], lent: Any = ()) -> Returns:
        outgoing = yield from self.send(self.sliced(slices, tag, lent))
        arrival = Adding(self, slices[self.rank], out, outgoing, tag, back=False)
        self.under_way.append(arrival)
        return arrival

    def sliced(self, slices: list[list[int]], tag: int, lent: Any, back: bool = False) -> list[Outgoing]:
        order = [(self.rank + step) % self.size for step in range(1, self.size)]
        if all(slices[k] is slices[order[0]] for k in order) and not back:
            return [Outgoing(slices[order[0]], order, tag, lent[order[0]] if lent else (), back)]
        return [Outgoing(slices[k], [k], tag, lent[k] if lent else (), back) for k in order]

    def wait_for_readers(self) -> Returns:
        if self.mutant != "does not wait for readers":
            self.generation += 1
            yield from self.wait(self.hear())
        self.generation += 1

    def wrote_common(self, *, later: bool) -> Returns:
        self.generation += 1
        if not later:
            yield from self.tell_written()

    def tell_written(self) -> Returns:
        missed, self.told = self.generation - self.told, self.generation
        for dst in self.others if missed else ():
            for turn in range(missed):
                yield ("told", dst, turn)
        for dst in self.others if missed else ():
            if self.mutant != "tells and does not ring":
                yield from self.ring(dst)

    def silent(self, generation: int) -> Returns:
        generation -= self.mutant == "waits for the generation before"
        if generation <= self.settled:
            return []
        yield from self.hear_all(generation)
        missing = [src for src in self.others if self.heard[src] < generation]
        self.settled = self.settled if missing else generation
        if self.mutant == "waits for its neighbour alone":
            return [src for src in missing if src == (self.rank + 1) % self.size]
        return missing

    def hear_all(self, generation: int) -> Returns:
        for src in self.others:
            while self.heard[src] < generation:
                if not (yield ("heard", src)):
                    break
                self.heard[src] += 1

    def hear(self) -> Returns:
        yield from self.tell_written()
        if not (yield from self.silent(self.generation)):
            return None
        arrival = Hearing(self, self.generation)
        self.under_way.append(arrival)
        return arrival

    def wait(self, begun: Returns) -> Returns:
        arrival = yield from begun
        if arrival is not None:
            yield from self.until(arrival)

    def close(self) -> Returns:
        waits = self.mutant != "leaves at once"
        while waits:
            yield from self.drain_all()
            waits = False
            for dst in self.others:
                if dst not in self.gone and (yield from self.count(dst)) > self.behind[dst]:
                    waits = True
                    break
            yield ("nap",)
        for dst in self.others:
            yield from self.write(dst, (LEFT,))
            yield from self.ring(dst)

    # ---- mailboxes and alarms, each in one step

    def mail(self, dst: int, record: Record) -> Returns:
        return (yield ("mail", dst, record))

    def poll(self, src: int) -> Returns:
        return (yield ("poll", src))

    def count(self, dst: int) -> Returns:
        return (yield ("filled", dst))

    def ring(self, dst: int) -> Returns:
        yield ("ring", dst)

    def doze(self) -> Returns:
        yield ("doze",)

    def sleep(self) -> Returns:
        return (yield ("sleep",))

    def wake(self) -> Returns:
        yield ("wake",)

    # ---- sending

    def send(self, outgoing: list[Outgoing]) -> Returns:
        yield from self.drain_all()
        for one in outgoing:
            yield from self.pump(one)
        return outgoing

    def pump(self, outgoing: Outgoing) -> Returns:
        if outgoing.pumping:
            return
        outgoing.pumping = True
        while outgoing.may_go_on():
            late = self.mutant == "publishes before it copies"
            block = yield from self.put(outgoing, late)
            block.outgoing = outgoing
            outgoing.sent += 1
            for dst in outgoing.readers:
                outgoing.unread[dst] += 1
                yield from self.post(dst, (DATA, outgoing.tag, block.cell, block.number))
            if late and not block.lent:
                yield ("store", *block.cell, outgoing.chunks[outgoing.sent - 1])
        outgoing.pumping = False
        if outgoing.sent < outgoing.count:
            if outgoing not in self.unsent:
                self.unsent.append(outgoing)
        elif outgoing in self.unsent:
            self.unsent.remove(outgoing)

    def put(self, outgoing: Outgoing, late: bool) -> Returns:
        """``Arena.put``."""
        if outgoing.lent:
            block = Block(outgoing.cells[outgoing.sent], True)
        else:
            if not self.free:
                self.free.append(Block(("block", self.rank, self.blocks), False))
                self.blocks += 1
            block = self.free.pop()
            if not late:
                yield ("store", *block.cell, outgoing.chunks[outgoing.sent])
            block.source = (outgoing.chunks, outgoing.sent) if outgoing.back else None
        self.number += 1
        block.number, block.readers = self.number, len(outgoing.readers)
        self.blocks_under_way[block.number] = block
        return block

    def was_read(self, number: int) -> Returns:
        """``Arena.read``."""
        block = self.blocks_under_way[number]
        if self.mutant == "frees a block at the first reader" and block.readers > 1 and not block.lent:
            self.free.append(Block(block.cell, False))
            block.lent = True
        block.readers -= 1
        if block.readers:
            return block
        del self.blocks_under_way[number]
        if block.source is not None:
            chunks, place = block.source
            chunks[place] = yield ("load", *block.cell)
            block.source = None
        if not block.lent:
            self.free.append(block)
        return block

    def write(self, dst: int, record: Record) -> Returns:
        """``Mailbox.write``."""
        if not (yield from self.mail(dst, record)):
            return False
        self.behind[dst] = 0 if record[0] == DATA else self.behind[dst] + 1
        return True

    def post(self, dst: int, record: Record) -> Returns:
        while not (record[0] == READ and dst in self.gone):
            if (yield from self.write(dst, record)):
                break
            self.hope_for(dst)
            yield from self.drain_all()
            yield ("nap",)
        yield from self.ring(dst)

    # ---- receiving

    def take(self, src: int, tag: int) -> Record | None:
        early = self.early.get((src, tag))
        if not early:
            return None
        record = early.pop(0)
        if not early:
            del self.early[src, tag]
        return record

    def read(self, src: int, record: Record) -> Returns:
        if self.mutant != "acknowledges nothing":
            yield from self.post(src, (READ, record[3]))

    def until(self, arrival: Arrival) -> Returns:
        while True:
            gone = len(self.gone)
            if (yield from arrival.advance()):
                break
            if (yield from self.drain_all()):
                continue
            if len(self.gone) > gone and self.mutant != "says who has left before it looks":
                continue
            for src in (yield from arrival.waits_for()):
                self.hope_for(src)
            yield from self.get_on(arrival)
            yield from self.doze()
            woken = False
            if self.mutant != "sleeps without a last look":
                woken = yield from arrival.advance()
                woken = woken or (yield from self.drain_all())
            woken = woken or (yield from self.sleep())
            yield from self.wake()
            if not woken:
                yield from self.drain_all()
        if arrival in self.under_way:
            self.under_way.remove(arrival)

    def get_on(self, but: Arrival) -> Returns:
        """``_advance``."""
        for place, arrival in enumerate(list(self.under_way)):
            assert place >= 0  # seen by the checker: how far this loop has come
            if arrival is not but and (yield from arrival.advance()):
                self.under_way.remove(arrival)

    def drain_all(self) -> Returns:
        found = False
        for src in self.others:
            while (record := (yield from self.poll(src))) is not None:
                yield from self.sort_in(src, record)
                found = True
        return found

    def sort_in(self, src: int, record: Record) -> Returns:
        match record:
            case (kind, tag, _, _) if kind == DATA:
                self.early.setdefault((src, tag), []).append(record)
            case (kind, number) if kind == READ:
                block = yield from self.was_read(number)
                if (outgoing := block.outgoing) is not None:
                    block.outgoing = outgoing if block.readers else None
                    outgoing.unread[src] -= 1
                    yield from self.pump(outgoing)
            case _:
                self.gone.append(src)

    def hope_for(self, src: int) -> None:
        assert src not in self.gone, f"rank {src} has left, it says"


class Fine(Rank):
    """The same down to each semaphore."""

    def __init__(self, rank: int, size: int, records: int, mutant: str = "") -> None:
        super().__init__(rank, size, mutant)
        self.records = records
        self.outboxes = {dst: Ring(records, rank, dst, mutant) for dst in self.others}
        self.inboxes = {src: Ring(records, src, rank, mutant) for src in self.others}
        self.bells = {other: Bell(other) for other in range(size)}

    def mail(self, dst: int, record: Record) -> Returns:
        return (yield from self.outboxes[dst].write(record))

    def poll(self, src: int) -> Returns:
        return (yield from self.inboxes[src].read())

    def count(self, dst: int) -> Returns:
        return self.records - (yield ("value", self.outboxes[dst].room))

    def ring(self, dst: int) -> Returns:
        yield from self.bells[dst].ring()

    def doze(self) -> Returns:
        yield from self.bells[self.rank].doze()

    def sleep(self) -> Returns:
        return (yield from self.bells[self.rank].sleep())

    def wake(self) -> Returns:
        yield from self.bells[self.rank].wake()


class Swift(Rank):
    """The same with fewer places, for three ranks: it looks at all mailboxes in one step, and takes of each as many
    records as it likes, at least one in all; what its bell does is left out, and it sleeps until something is there."""

    def drain_all(self) -> Returns:
        taken = yield ("drain",)
        for src, record in taken:
            yield from self.sort_in(src, record)
        return bool(taken)

    def until(self, arrival: Arrival) -> Returns:
        while True:
            if (yield from arrival.advance()):
                break
            waiting = yield from arrival.waits_for()
            if not waiting:
                continue
            taken = yield ("await", tuple(waiting))
            for src, record in taken:
                yield from self.sort_in(src, record)
            yield from self.get_on(arrival)
        if arrival in self.under_way:
            self.under_way.remove(arrival)

    def tell_written(self) -> Returns:
        missed, self.told = self.generation - self.told, self.generation
        if missed:
            yield ("tell", self.others, missed)

    def hear_all(self, generation: int) -> Returns:
        wanted = tuple((src, generation - self.heard[src]) for src in self.others if self.heard[src] < generation)
        taken = yield ("hear", wanted)
        for (src, _), count in zip(wanted, taken, strict=True):
            self.heard[src] += count
