"""Messages between the ranks of a host, through memory that they share.

    sender                                         receiver
    copy x into its own block                      .
    record (tag, where the block is)  ──► mailbox  take it; keep early ones
    .                                              copy it into place
    block is free again               ◄── mailbox  record (read)

A message is on its way when ``send`` returns.  The members of a collective read each other's tensors in place
(``meeting.py``).  A gather into common memory moves nothing at all.

A waiting rank looks for a while before it sleeps, if every rank has a core.  The end of another process is seen within
``LOOK_SECONDS``.
"""

from __future__ import annotations

import errno
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.deadline import clock
from plait.comm.operation import NO_NOTE, Operation, copied
from plait.comm.transport import Started, Transport
from plait.shared_memory.arena import Arena, SharedBlock
from plait.shared_memory.common import CommonMemory
from plait.shared_memory.mailbox import DATA, HERE, LEFT, READ, Mailbox, MailRecord
from plait.shared_memory.mailbox_registry import MailboxRegistry
from plait.shared_memory.meeting import Adding, Copying, InPlace, Meeting
from plait.shared_memory.segment import Segment

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


class Breaking:
    """Any error inside of it breaks this rank's world."""

    __slots__ = ("_mail", "_operation")

    def __init__(self, mail: SharedMemoryTransport, operation: Operation) -> None:
        self._mail, self._operation = mail, operation

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConnectionError | TimeoutError):
            raise self._mail.failure(self._operation, error) from error
        if error is not None:
            self._mail.broken = self._mail.broken or f"this world broke down earlier, in {self._operation}"


class SharedMemoryTransport(Transport):
    """Messages of one rank."""

    progresses = False

    def __init__(self, registry: MailboxRegistry, comm: Comm) -> None:
        super().__init__(comm)
        self.registry, self.arena, self._process = registry, Arena(registry.name), os.getpid()
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        """The collectives of groups, by their ranks."""
        self._sent: dict[tuple[int, int], SharedBlock] = {}
        """The messages that are not read yet, by place."""
        self._here: set[int] = set()
        self._early: defaultdict[tuple[int, int], deque[MailRecord]] = defaultdict(deque)
        """Messages that came before they were requested, by rank and tag."""
        self._gone: dict[int, str] = {}
        self._under_way: dict[int, Callable[[], bool]] = {}
        """Each advances a collective as far as it can without waiting; True when it is complete."""
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
            with Breaking(self, operation):
                self._drain_all()
                block = self.arena.put(tensor.view(-1))
                self._sent[block.place] = block
                self.post(dst, MailRecord(DATA, tag, *block.place, tensor.nbytes))
        return []

    def recv(self, operation: Operation, tensor: Tensor, src: int, tag: int) -> list[Started]:
        self._check(operation)
        if not tensor.numel():
            return []
        flat = tensor.view(-1)

        def advance() -> bool:
            record = self.take(src, tag, flat.nbytes)
            if record is not None:
                flat.copy_(self.view(src, record, flat))
                self.post(src, record._replace(kind=READ))
            return record is not None

        return [(partial(self._until, advance, lambda: [src]), tensor)]

    def _segment(self, operation: Operation, size: int) -> Segment:
        """Returns a segment that the first member of a group makes, and all of them open."""
        (first, *_), n = operation.group.ranks, len(operation.group.ranks)
        slots, here = torch.zeros(n, dtype=torch.int64).tensor_split(n), operation.group.index
        if self.rank == first:
            try:
                segment = Segment.make(size, self.registry.name)
            except MemoryError as error:  # the others wait for it, and read the reason
                self.give_up(f"rank {self.rank}: {error}")
                raise
            slots[0].fill_(segment.descriptor)
        self.wait(operation, self.exchange(operation, slots, [slots[here]] * n, 0))
        if self.rank != first:
            try:
                segment = self.registry.open(first, int(slots[0]))
            except OSError as error:
                raise self.failure(operation, error) from error
        self.wait(operation, self.exchange(operation, slots, [slots[here]] * n, 0))  # all have opened it
        if self.rank == first:
            segment.close()
        return segment

    def exchange(
        self, operation: Operation, slots: Sequence[Tensor], slices: Sequence[Tensor], tag: int
    ) -> list[Started]:
        return self._start(operation, Copying(self._meeting(operation), operation, slices, slots), slots[0])

    def _adding(self, operation: Operation, out: Tensor, source: Tensor) -> Adding:
        """A small all-reduce reads whole tensors.  Of a large one member k adds slice k and writes the sum to all."""
        n, meeting = len(operation.group.ranks), self._meeting(operation)
        if operation.kind == "reduce_scatter":
            return Adding(meeting, operation, source.tensor_split(n), out)
        if source.nbytes <= WHOLE_BYTES:
            return Adding(meeting, operation, [source] * n, source, lent=False)  # the sum replaces it
        length = -(-source.numel() // n)
        slices = [source[k * length : (k + 1) * length] for k in range(n)]
        return Adding(meeting, operation, slices, slices[operation.group.index], back=True)

    def _meeting(self, operation: Operation) -> Meeting:
        self._check(operation)
        group = operation.group
        if group.ranks not in self._meetings:
            with Breaking(self, operation):
                self._meetings[group.ranks] = Meeting(self, group)
        return self._meetings[group.ranks]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor that others read in place."""
        return self.arena.empty(numel, dtype)

    def common(self, operation: Operation) -> Tensor:
        """Returns zeros in memory that the members of a group share; all of them ask for it."""
        ranks = operation.group.ranks
        if ranks not in self._common:
            written, share = self._meeting(operation).common, partial(self._segment, operation)
            self._common[ranks] = CommonMemory(operation.group, written, share)
        return self._common[ranks].empty(operation.numel, operation.dtype)

    def library(self, operation: Operation, out: Tensor, source: Tensor) -> list[Started] | None:
        """Reduces in place.  Moves nothing if the result is in common memory: each member waits until it is written."""
        kind, group, kept = operation.kind, operation.group, operation.kept
        if kind in ("reduce_scatter", "all_reduce"):
            if "adding" not in kept:
                kept["adding"] = self._adding(operation, out, source)
            return self._start(operation, kept["adding"], out)
        if "memory" not in kept:
            common = self._common.values() if kind in ("all_gather", "broadcast") else ()
            kept["memory"] = next((m for m in common if m.has(out, group.ranks)), None)
            kept["copies"] = kind == "all_gather" and source.data_ptr() != out.data_ptr() + group.index * source.nbytes
        if (memory := kept["memory"]) is None:
            return None
        self._check(operation)
        if kept["copies"]:
            copied(out.tensor_split(len(group.ranks))[group.index], source)
            memory.generation += 1
        return self._hear(memory, out) if memory.complete < memory.generation else []

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
                self.ring(memory.tell())

    def _hear(self, memory: CommonMemory, out: Tensor) -> list[Started]:
        """Starts to wait until all members have written this generation; empty if they have reported it."""
        self.ring(memory.tell())
        if (heard := partial(memory.silent, memory.generation))():
            return self._begun(lambda: not heard(), heard, out)
        memory.complete = memory.generation
        return []

    def wait(self, operation: Operation, works: Sequence[Started]) -> None:
        end = clock() + self.deadline
        with self._waiting(operation), Breaking(self, operation):
            for finish, _ in works:
                finish(end)

    @property
    def is_busy(self) -> bool:
        """True if something is under way that others may wait for, and that only advances in this rank's waits."""
        return bool(self._under_way)

    def get_on(self, operation: Operation) -> None:
        """Advances the messages under way, while this rank waits for ``operation`` elsewhere."""
        with Breaking(self, operation):
            self._drain_all()
            self._advance()

    def close(self) -> None:
        """Stays until the others have its messages, or until its deadline; then reports that it leaves."""
        if os.getpid() != self._process:  # a copy made by fork
            return
        try:
            end, waits = clock() + (LAST_SECONDS if self.broken else self.deadline), True
            while waits and clock() < end:
                self._look()
                self._advance()
                boxes = self.registry.outboxes.items()
                waits = any(r not in self._gone and not (r in self._here and box.delivered) for r, box in boxes)
                waits |= any(
                    r not in self._gone for meeting in self._meetings.values() for r in meeting.read.silent(meeting.put)
                )
                time.sleep(NAP_SECONDS if waits else 0)
        except OSError:
            if not self.broken:
                raise
        finally:
            self._leave()
            self.arena.close()
            self.registry.close()
            super().close()

    def give_up(self, why: str) -> None:
        super().give_up(why)
        self._leave()

    def _leave(self) -> None:
        for dst, box in self.registry.outboxes.items():
            box.write(MailRecord(LEFT))  # a full mailbox belongs to a rank that will see this process end
            self.registry.alarms[dst].ring()

    # ---- sending -----------------------------------------------------------------------------------------

    def post(self, dst: int, record: MailRecord) -> None:
        """Writes to a rank's mailbox, and waits for room in it."""
        end = 0.0
        while not (record.kind == READ and dst in self._gone) and not self.registry.outboxes[dst].write(record):
            end = end or clock() + self.deadline
            self._hope_for(dst, end)
            self._look()
            time.sleep(NAP_SECONDS)
        self.registry.alarms[dst].ring()

    def ring(self, ranks: Iterable[int]) -> None:
        """Wakes ranks that sleep."""
        for rank in ranks:
            self.registry.alarms[rank].ring()

    # ---- receiving ---------------------------------------------------------------------------------------

    def take(self, src: int, tag: int, nbytes: int) -> MailRecord | None:
        """A rank's next message with a tag, if it has come; ConnectionError if it has not this length."""
        early = self._early.get((src, tag))
        if not early:
            return None
        record = early.popleft()
        if not early:
            del self._early[src, tag]
        if record.nbytes != nbytes:  # tags, which have the dtype and the shape in them, are checksums
            raise ConnectionError(f"rank {src} sent {record.nbytes} bytes where {nbytes} were meant")
        return record

    def view(self, src: int, record: MailRecord, like: Tensor) -> Tensor:
        """Returns a message without copying it."""
        return self.registry.segment(src, record.descriptor).view(record.offset, like.numel(), like.dtype)

    def _start(self, operation: Operation, collective: InPlace, memory: Tensor) -> list[Started]:
        self._check(operation)
        with Breaking(self, operation):
            collective.begin()
        return self._begun(collective.advance, collective.waits_for, memory)

    def _begun(self, advance: Callable[[], bool], waits_for: Callable[[], list[int]], memory: Tensor) -> list[Started]:
        self._under_way[id(advance)] = advance
        return [(partial(self._until, advance, waits_for), memory)]

    def _until(self, advance: Callable[[], bool], waits_for: Callable[[], list[int]], end: float) -> None:
        """Advances something until it is complete: looks at first, then sleeps.

        Members of several groups may wait for them in different orders, so this rank advances everything under way
        before it sleeps.  ``waits_for`` returns the ranks that must still do something, at least one.
        """
        spin = 0.0
        while not advance():
            spin = spin or time.perf_counter() + self._spin
            if self._drain_all() or time.perf_counter() < spin:
                continue
            for src in waits_for():
                self._hope_for(src, end)
            nap = min(LOOK_SECONDS, max(0.001, end - clock()))
            if not self.registry.alarm.sleep(lambda: self._advance() or advance() or self._drain_all(), nap):
                self._look()
        self._under_way.pop(id(advance), None)

    def _advance(self) -> bool:
        """Advances all collectives under way; True if one of them is complete."""
        left = {key: advance for key, advance in self._under_way.items() if not advance()}
        before, self._under_way = self._under_way, left
        return len(left) < len(before)

    def _drain_all(self) -> bool:
        """Takes in all messages that have come, so that read blocks can be used again; True if there were any."""
        found = False
        for src, inbox in self.registry.inboxes.items():
            while inbox.filled.take():
                self._sort_in(src, inbox)
                found = True
        return found

    def _sort_in(self, src: int, inbox: Mailbox) -> None:
        """Takes in a record after its ``filled`` was taken."""
        record = inbox.read()
        if record.kind == DATA:
            self.can_open(src, record.descriptor)
        inbox.room.post()
        if record.kind == DATA and src not in self._gone:
            self._early[src, record.tag].append(record)
        elif record.kind == READ:
            self.arena.free(self._sent.pop((record.descriptor, record.offset)))
        elif record.kind == HERE:
            self._here.add(src)
        elif record.kind == LEFT:
            self._gone[src] = f"rank {src} has left"

    def can_open(self, src: int, descriptor: int) -> bool:
        """Opens a segment of a rank; False if the rank has ended.  ConnectionError if it may not be opened."""
        try:
            self.registry.segment(src, descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH, errno.ESTALE):
                raise ConnectionError(f"the memory of rank {src} cannot be opened ({error.strerror})") from error
            self._gone.setdefault(src, f"the process of rank {src} has ended")
            return False
        return True

    def _look(self) -> None:
        """Takes in all messages that have come, and notes the ranks that have ended."""
        ended = self.registry.ended()
        self._drain_all()
        for src in ended:
            self._gone.setdefault(src, f"the process of rank {src} has ended")

    def _hope_for(self, rank: int, end: float) -> None:
        """Raises if nothing more will come from a rank, or the time is up."""
        if rank in self._gone:
            raise ConnectionResetError(self._gone[rank])
        if clock() > end:
            raise TimeoutError(f"rank {rank} did not come")
