"""Messages between the ranks of a host, through memory that they share.

    sender                                         receiver
    copy x into its own block                      .
    record (tag, where the block is)  ──► mailbox  take it; keep early ones
    .                                              copy it into place, or add straight from the block
    block is free again               ◄── mailbox  record (read)

A tensor of ``Comm.empty`` is in memory that others can open: in a collective the record gives its place, nothing is
copied into a block, and the wait ends when all have read it.  A gather into common memory moves nothing at all.

A message to one rank is on its way when ``send`` returns.  Collectives are sent in chunks, a few at a time, so that
blocks stay in cache, and the first chunk is added before the last has been sent.  The rest follows whenever this rank
waits for anything, as blocks become free.  All members take chunk k of everyone before chunk k + 1, so the slowest
always finds its chunk.

A waiting rank looks for a while before it sleeps, if every rank has a core.  The end of another process is seen within
``LOOK_SECONDS``.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.deadline import clock
from plait.comm.operation import NO_NOTE, Operation, copied
from plait.comm.transport import Started, Transport
from plait.shared_memory.arena import Arena
from plait.shared_memory.arrivals import Adding, Arrival, Copying, Hearing
from plait.shared_memory.common import CommonMemory, share_segment
from plait.shared_memory.mailbox import DATA, HERE, LEFT, READ, MailRecord
from plait.shared_memory.mailbox_registry import MailboxRegistry
from plait.shared_memory.outgoing import Outgoing, chunks, sliced

WHOLE_BYTES = 2**16
"""The most bytes of an all-reduce that sends whole tensors: one round of messages instead of two."""

SPIN_SECONDS = 0.0005
"""The seconds that a rank with its own core looks before it sleeps."""

LOOK_SECONDS = 0.05
"""The seconds between two checks that the others are still there."""

LAST_SECONDS = 2.0
"""The seconds that a rank whose world broke waits for the others to take its earlier messages."""

NAP_SECONDS = 0.001
"""The seconds between two looks at a full mailbox, and at unread messages."""


class SharedMemoryTransport(Transport):
    """Messages of one rank."""

    progresses = False

    def __init__(self, registry: MailboxRegistry, comm: Comm) -> None:
        super().__init__(comm)
        self._registry, self._arena, self._process = registry, Arena(registry.name), os.getpid()
        self._unsent: dict[int, Outgoing] = {}
        """Tensors whose last chunk is not sent yet."""
        self._here: set[int] = set()
        self._early: defaultdict[tuple[int, int], deque[MailRecord]] = defaultdict(deque)
        """Messages that came before they were requested, by rank and tag."""
        self._gone: dict[int, str] = {}
        self._under_way: dict[int, Arrival] = {}
        """Arrivals that this rank has to advance."""
        self._common: dict[tuple[int, ...], CommonMemory] = {}
        """The memory of groups, by their ranks."""
        ranks, threads = len(registry.inboxes) + 1, torch.get_num_threads()
        for box in registry.outboxes.values():
            box.write(MailRecord(HERE))
        self._spin = SPIN_SECONDS if ranks * threads <= len(os.sched_getaffinity(0)) else 0.0

    # ---- what may be asked -------------------------------------------------------------------------------

    def send(self, operation: Operation, tensor: Tensor, dst: int, tag: int) -> list[Started]:
        self._check(operation)
        if tensor.numel():
            self._send([Outgoing(operation, [tensor.view(-1)], [dst], tag)])
        return []

    def recv(self, operation: Operation, tensor: Tensor, src: int, tag: int) -> list[Started]:
        self._check(operation)
        if not tensor.numel():
            return []
        return [(partial(self._until, Copying(self, {src: [tensor.view(-1)]}, (), tag)), tensor)]

    def exchange(
        self, operation: Operation, slots: Sequence[Tensor], slices: Sequence[Tensor], tag: int
    ) -> list[Started]:
        outgoing = self._send(sliced(operation, slices, tag, lent=True))
        ranks, index, n = operation.group.ranks, operation.group.index, len(slots)
        order = [(index - step) % n for step in range(1, n)]
        return self._begun(Copying(self, {ranks[k]: chunks(slots[k]) for k in order}, outgoing, tag), slots[index])

    def reduce(
        self, operation: Operation, mine: Tensor, slices: Sequence[Tensor], out: Tensor, tag: int
    ) -> tuple[list[Started], None]:
        here = operation.group.index
        lent = all(part is not mine for k, part in enumerate(slices) if k != here)  # else out, if it is mine, changes
        outgoing = self._send(sliced(operation, slices, tag, lent=lent))
        return self._begun(Adding(self, operation, chunks(mine), chunks(out), outgoing, tag), out), None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor that others read in place."""
        return self._arena.empty(numel, dtype)

    def common(self, operation: Operation) -> Tensor:
        """Returns zeros in memory that the members of a group share; all of them ask for it."""
        ranks = operation.group.ranks
        if ranks not in self._common:
            self._common[ranks] = CommonMemory(operation.group, partial(share_segment, self, self._registry, operation))
        return self._common[ranks].empty(operation.numel, operation.dtype)

    def all_reduce(self, operation: Operation, tensor: Tensor, tag: int) -> list[Started]:
        """Sends slice k to member k, who adds them and writes the sum to all; empty if sending wholes is as good."""
        n, index = len(operation.group.ranks), operation.group.index
        if tensor.nbytes <= WHOLE_BYTES:
            return []
        length = -(-tensor.numel() // n)
        slices = [tensor[k * length : (k + 1) * length] for k in range(n)]
        outgoing = self._send(sliced(operation, slices, tag, lent=True, back=True))
        mine = chunks(slices[index])
        return self._begun(Adding(self, operation, mine, mine, outgoing, tag, back=True), tensor)

    def library(self, operation: Operation, out: Tensor, source: Tensor) -> list[Started] | None:
        """Moves nothing if the result is in common memory: each member waits until all of it is written."""
        group = operation.group
        if operation.kind not in ("all_gather", "broadcast"):
            return None
        for memory in self._common.values():
            if memory.has(out, group.ranks):
                break
        else:
            return None
        self._check(operation)
        if operation.kind == "all_gather" and source.data_ptr() != out.data_ptr() + group.index * source.nbytes:
            copied(out.tensor_split(len(group.ranks))[group.index], source)
            memory.generation += 1
        return self._hear(memory, out)

    def wait_for_readers(self) -> None:
        """Returns when all members have called it, so that none of them reads common memory; then they write."""
        begun = []
        for memory in self._common.values():
            operation = Operation("wait for readers of common memory", memory.group, NO_NOTE, 0, torch.uint8)
            self._check(operation)
            memory.generation += 1
            begun.append((operation, self._hear(memory, torch.empty(0))))
        for operation, works in begun:
            self.wait(operation, works)
        for memory in self._common.values():
            memory.generation += 1

    def wrote_common(self, *, later: bool) -> None:
        """Reports a write to all members, who may wait for it, now or at the next gather."""
        for memory in self._common.values():
            memory.generation += 1
            if not later:
                self._tell_written(memory)

    def _tell_written(self, memory: CommonMemory) -> None:
        for rank in memory.tell():
            self._registry.alarms[rank].ring()

    def _hear(self, memory: CommonMemory, out: Tensor) -> list[Started]:
        """Starts to wait until all members have written this generation; empty if they have already reported it."""
        self._tell_written(memory)
        return self._begun(Hearing(memory, memory.generation), out) if memory.silent(memory.generation) else []

    def wait(self, operation: Operation, works: Sequence[Started]) -> None:
        end = clock() + self.deadline
        with self._waiting(operation):
            try:
                for finish, _ in works:
                    finish(end)
            except (ConnectionError, TimeoutError) as error:
                raise self.failure(operation, error) from error
            except BaseException:
                self.broken = self.broken or f"this world broke down earlier, in {operation}"
                raise

    @property
    def is_busy(self) -> bool:
        """True if something is under way that others may wait for, and that only advances in this rank's waits."""
        return bool(self._unsent or self._under_way)

    def get_on(self, operation: Operation) -> None:
        """Advances the messages under way, while this rank waits for ``operation`` elsewhere."""
        try:
            self._drain_all()
            self._advance()
            self._send_rest()
        except (ConnectionError, TimeoutError) as error:
            raise self.failure(operation, error) from error

    def close(self) -> None:
        """Stays until the others have its messages, or until its deadline; then reports that it leaves."""
        if os.getpid() != self._process:  # a copy made by fork
            return
        try:
            end, waits = clock() + (LAST_SECONDS if self.broken else self.deadline), True
            while waits and clock() < end:
                self._look()
                boxes = self._registry.outboxes.items()
                waits = any(r not in self._gone and not (r in self._here and box.delivered) for r, box in boxes)
                time.sleep(NAP_SECONDS if waits else 0)
        except OSError:
            if not self.broken:
                raise
        finally:
            self._leave()
            self._arena.close()
            self._registry.close()
            super().close()

    def give_up(self, why: str) -> None:
        super().give_up(why)
        self._leave()

    def _leave(self) -> None:
        for dst, box in self._registry.outboxes.items():
            box.write(MailRecord(LEFT))  # a full mailbox belongs to a rank that will see this process end
            self._registry.alarms[dst].ring()

    # ---- sending -----------------------------------------------------------------------------------------

    def _send(self, outgoing: list[Outgoing]) -> list[Outgoing]:
        """Begins to send the messages of an operation."""
        self._check(outgoing[0].operation)
        self._drain_all()
        for one in outgoing:
            self._begin(one)
        return outgoing

    def _begin(self, outgoing: Outgoing) -> None:
        try:
            self._pump(outgoing)
        except (ConnectionError, TimeoutError) as error:
            raise self.failure(outgoing.operation, error) from error

    def _pump(self, outgoing: Outgoing, *, all_of_it: bool = False) -> None:
        """Sends more chunks, as far as the window allows."""
        if outgoing.pumping:  # it waits for room in a mailbox
            return
        outgoing.pumping = True  # and stays so after an error: the world is broken then
        while outgoing.may_go_on or (all_of_it and outgoing.sent < outgoing.count):
            data = outgoing.chunks[outgoing.sent]
            try:
                block = self._arena.put(data, len(outgoing.readers), lend=outgoing.lent, back=outgoing.back)
            except BaseException:
                self.broken = self.broken or f"this world broke down earlier, in {outgoing.operation}"
                raise
            block.outgoing = outgoing
            outgoing.lent &= block.lent
            outgoing.sent += 1
            record = MailRecord(DATA, outgoing.tag, block.segment.descriptor, block.offset, data.nbytes, block.number)
            for dst in outgoing.readers:
                outgoing.unread[dst] += 1
                self._post(dst, record)
        outgoing.pumping = False
        if outgoing.sent < outgoing.count:
            self._unsent[id(outgoing)] = outgoing
        else:
            if not outgoing.lent:
                outgoing.chunks = ()  # its tensor is its owner's again
            self._unsent.pop(id(outgoing), None)

    def _post(self, dst: int, record: MailRecord) -> None:
        end = 0.0
        while not (record.kind == READ and dst in self._gone) and not self._registry.outboxes[dst].write(record):
            end = end or clock() + self.deadline
            self._hope_for(dst, end)
            self._look()
            time.sleep(NAP_SECONDS)
        self._registry.alarms[dst].ring()

    # ---- receiving ---------------------------------------------------------------------------------------

    def take(self, src: int, tag: int, like: Tensor) -> MailRecord | None:
        """A rank's next message with a tag, if it has come; ConnectionError if its length differs from ``like``."""
        early = self._early.get((src, tag))
        if not early:
            return None
        record = early.popleft()
        if not early:
            del self._early[src, tag]
        if record.nbytes != like.nbytes:  # tags, which have the dtype and the shape in them, are checksums
            raise ConnectionError(f"rank {src} sent {record.nbytes} bytes where {like.nbytes} were meant")
        return record

    def view(self, src: int, record: MailRecord, like: Tensor) -> Tensor:
        """Returns a message without copying it."""
        return self._registry.segment(src, record.descriptor).view(record.offset, like.numel(), like.dtype)

    def read(self, src: int, record: MailRecord) -> None:
        """Returns the block to its owner, unless the owner has left."""
        self._post(src, MailRecord(READ, number=record.number))

    def _begun(self, arrival: Arrival, memory: Tensor) -> list[Started]:
        self._under_way[id(arrival)] = arrival
        return [(partial(self._until, arrival), memory)]

    def _until(self, arrival: Arrival, end: float) -> None:
        """Takes in messages until the arrival is complete: looks at first, then sleeps.

        Members of several groups may wait for them in different orders, so this rank advances everything under way
        before it sleeps; if that takes too long, the windows are opened.
        """
        spin = time.perf_counter() + self._spin
        patience = time.monotonic() + LOOK_SECONDS
        gone = len(self._gone)
        while not arrival.advance():
            if self._drain_all() or len(self._gone) > gone or time.perf_counter() < spin:
                gone = len(self._gone)  # everything that they sent before has come: look at it first
                continue
            for src in arrival.waits_for():
                self._hope_for(src, end)
            self._advance(but=arrival)
            nap = min(LOOK_SECONDS, max(0.001, end - clock()))
            if not self._registry.alarm.sleep(lambda: arrival.advance() or self._drain_all(), nap):
                self._look()
            if self._unsent and time.monotonic() > patience:
                self._send_rest()
        self._under_way.pop(id(arrival), None)

    def _advance(self, but: Arrival | None = None) -> None:
        """Advances all arrivals under way except ``but``."""
        for key, arrival in list(self._under_way.items()):
            if arrival is not but and arrival.advance():
                del self._under_way[key]

    def _send_rest(self) -> None:
        """Sends the rest of all begun messages, regardless of the window."""
        for outgoing in list(self._unsent.values()):
            self._pump(outgoing, all_of_it=True)

    def _drain_all(self) -> bool:
        """Takes in all messages that have come, so that read blocks can be used again; True if there were any."""
        return sum(self._drain(src) for src in self._registry.inboxes) > 0

    def _drain(self, src: int) -> bool:
        """Takes in the messages that have come from a rank; True if there were any."""
        inbox, found = self._registry.inboxes[src], False
        while inbox.filled.take():
            self._sort_in(src)
            found = True
        return found

    def _sort_in(self, src: int) -> None:
        """Takes in a record after its ``filled`` was taken."""
        inbox = self._registry.inboxes[src]
        record = inbox.read()
        if record.kind == DATA and not self._registry.can_open(src, record.descriptor):
            self._gone.setdefault(src, f"the process of rank {src} has ended")
        inbox.room.post()
        if record.kind == DATA and src not in self._gone:
            self._early[src, record.tag].append(record)
        elif record.kind == READ:
            block = self._arena.read(record.number)
            if isinstance(outgoing := block.outgoing, Outgoing):
                block.outgoing = outgoing if block.readers else None
                outgoing.unread[src] -= 1
                self._pump(outgoing)
        elif record.kind == HERE:
            self._here.add(src)
        elif record.kind == LEFT:
            self._gone[src] = f"rank {src} has left"

    def _look(self) -> None:
        """Takes in all messages that have come, and notes the ranks that have ended."""
        ended = self._registry.ended()
        self._drain_all()
        for src in ended:
            self._gone.setdefault(src, f"the process of rank {src} has ended")

    def _hope_for(self, rank: int, end: float) -> None:
        """Raises if nothing more will come from a rank, or the time is up."""
        if rank in self._gone:
            raise ConnectionResetError(self._gone[rank])
        if clock() > end:
            raise TimeoutError(f"rank {rank} did not come")
