"""Messages between the ranks of a host, through memory that they share.

    sender                                         receiver
    copy x into a block of its own                 .
    record (tag, where the block is)  ──► mailbox  take it; keep what comes early
    .                                              copy it into place, or add straight from the block
    block is free again               ◄── mailbox  record (read)

A message to one rank is on its way when ``send`` returns.  Collectives go in chunks, of which ``WINDOW`` are under way:
so blocks stay in cache, and the first chunk is added while the last has not been sent.  The rest follows whenever this
rank waits for anything, as blocks become free.  All members take chunk k of everyone before chunk k + 1, so the one
that is furthest behind always finds what it needs.

A rank that waits looks for a while before it sleeps, where every rank has a core.  The end of another process is seen
within ``LOOK_SECONDS``.
"""

from __future__ import annotations

import errno
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from plait.comm.header import DTYPES
from plait.comm.operation import Operation, name_of
from plait.comm.ordered_reduce import ordered_sum
from plait.comm.shared_memory.arena import Arena
from plait.comm.shared_memory.mailbox import DATA, HERE, LEFT, READ, MailRecord
from plait.comm.shared_memory.office import Office
from plait.comm.transport import Started, Transport, Wires

CHUNK_BYTES = 2**20
WINDOW = 4
"""Chunks of a collective that wait to be read, at most."""

SPIN_SECONDS = 0.0005
"""For which a rank that has a core of its own looks before it sleeps."""

LOOK_SECONDS = 0.05
"""Between two looks at whether the others are still there."""

LAST_SECONDS = 2.0
"""For which a rank whose world broke waits until the others have what it sent before."""

NAP_SECONDS = 0.001
"""Between two looks at several ranks."""


CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
"""What a record says of a dtype."""


class Outgoing:
    """What of a tensor has been sent."""

    __slots__ = ("chunks", "count", "operation", "pumping", "readers", "sent", "tag", "unread")

    def __init__(self, operation: Operation, chunks: Sequence[Tensor], readers: Sequence[int], tag: int) -> None:
        self.operation, self.chunks, self.readers, self.tag = operation, chunks, readers, tag
        self.count, self.sent, self.unread = len(chunks), 0, 0
        self.pumping = False


class SharedMemoryTransport(Transport):
    """Messages of one rank."""

    progresses = False

    def __init__(self, office: Office, wires: Wires) -> None:
        super().__init__(wires)
        self._office, self._arena, self._process = office, Arena(office.name), os.getpid()
        self._unsent: dict[int, Outgoing] = {}
        """What was begun and is not sent to its end."""
        self._here: set[int] = set()
        self._early: defaultdict[tuple[int, int], deque[MailRecord]] = defaultdict(deque)
        """What has come and nobody has asked for yet, by rank and tag."""
        self._gone: dict[int, str] = {}
        ranks, threads = len(office.inboxes) + 1, torch.get_num_threads()
        for box in office.outboxes.values():
            box.write(MailRecord(HERE))
        self._spin = SPIN_SECONDS if ranks * threads <= len(os.sched_getaffinity(0)) else 0.0

    # ---- what may be asked -------------------------------------------------------------------------------

    def send(self, operation: Operation, tensor: Tensor, dst: int, tag: int) -> list[Started]:
        self._check(operation)
        if tensor.numel():
            self._drain_all()
            self._begin(Outgoing(operation, [tensor.view(-1)], [dst], tag))
        return []

    def recv(self, operation: Operation, tensor: Tensor, src: int, tag: int) -> list[Started]:
        self._check(operation)
        return [(partial(self._copied, [(src, [tensor.view(-1)])], (), tag), tensor)] if tensor.numel() else []

    def exchange(
        self, operation: Operation, slots: Sequence[Tensor], slices: Sequence[Tensor], tag: int
    ) -> list[Started]:
        outgoing = self._send_slices(operation, slices, tag)
        ranks, index, n = operation.group.ranks, operation.group.index, len(slots)
        order = [(index - step) % n for step in range(1, n)]
        into = [(ranks[k], chunks(slots[k])) for k in order]
        return [(partial(self._copied, into, outgoing, tag), slots[index])]

    def reduce(
        self, operation: Operation, mine: Tensor, slices: Sequence[Tensor], out: Tensor, tag: int
    ) -> tuple[list[Started], None]:
        outgoing = self._send_slices(operation, slices, tag)
        return [(partial(self._added, operation, mine, out, outgoing, tag), out)], None

    def wait(self, operation: Operation, works: Sequence[Started]) -> None:
        end = time.monotonic() + self.deadline
        with self._waiting(operation):
            try:
                for finish, _ in works:
                    finish(end)
            except (ConnectionError, TimeoutError) as error:
                raise self._failure(operation, error) from error
            except BaseException:
                self.broken = self.broken or f"this world broke down earlier, in {operation}"
                raise

    def has_come(self, src: int, tag: int) -> bool:
        """Whether a wait for a message ends at once: it is there, or never will be."""
        self._look()
        return bool(self._early.get((src, tag)) or src in self._gone or self.broken)

    def close(self) -> None:
        """Stays until the others have what was sent, or for its deadline; then says that it leaves."""
        if os.getpid() != self._process:  # a copy, made by fork
            return
        try:
            end, waits = time.monotonic() + (LAST_SECONDS if self.broken else self.deadline), True
            while waits and time.monotonic() < end:
                self._look()
                boxes = self._office.outboxes.items()
                waits = any(r not in self._gone and not (r in self._here and box.delivered) for r, box in boxes)
                time.sleep(NAP_SECONDS if waits else 0)
        except OSError:
            if not self.broken:
                raise
        finally:
            self._leave()
            self._arena.close()
            self._office.close()
            super().close()

    def give_up(self, why: str) -> None:
        super().give_up(why)
        self._leave()

    def _leave(self) -> None:
        for box in self._office.outboxes.values():
            box.write(MailRecord(LEFT))  # one that is full is of a rank that will see this process end

    # ---- sending -----------------------------------------------------------------------------------------

    def _send_slices(self, operation: Operation, slices: Sequence[Tensor], tag: int) -> list[Outgoing]:
        """Slice k to member k; once, where all are the same."""
        self._check(operation)
        ranks, index, n = operation.group.ranks, operation.group.index, len(slices)
        order = [(index + step) % n for step in range(1, n)]
        if all(slices[k] is slices[order[0]] for k in order):
            sent = [Outgoing(operation, chunks(slices[order[0]]), [ranks[k] for k in order], tag)]
        else:
            sent = [Outgoing(operation, chunks(slices[k]), [ranks[k]], tag) for k in order]
        self._drain_all()
        for outgoing in sent:
            self._begin(outgoing)
        return sent

    def _begin(self, outgoing: Outgoing) -> None:
        try:
            self._pump(outgoing)
        except (ConnectionError, TimeoutError) as error:
            raise self._failure(outgoing.operation, error) from error

    def _pump(self, outgoing: Outgoing, *, all_of_it: bool = False) -> None:
        """Sends on, as far as the window allows."""
        if outgoing.pumping:  # it waits for room in a mailbox
            return
        outgoing.pumping = True  # and stays so after an error: the world is broken then
        while outgoing.sent < outgoing.count and (all_of_it or outgoing.unread < WINDOW):
            data = outgoing.chunks[outgoing.sent]
            try:
                block = self._arena.put(data, len(outgoing.readers))
            except BaseException:
                self.broken = self.broken or f"this world broke down earlier, in {outgoing.operation}"
                raise
            block.outgoing = outgoing
            outgoing.sent, outgoing.unread = outgoing.sent + 1, outgoing.unread + 1
            record = MailRecord(
                DATA, outgoing.tag, block.segment.descriptor, block.offset, data.nbytes, CODES[data.dtype]
            )
            for dst in outgoing.readers:
                self._post(dst, record)
        outgoing.pumping = False
        if outgoing.sent < outgoing.count:
            self._unsent[id(outgoing)] = outgoing
        else:
            outgoing.chunks = ()  # its tensor is its owner's again
            self._unsent.pop(id(outgoing), None)

    def _post(self, dst: int, record: MailRecord) -> None:
        end = 0.0
        while not self._office.outboxes[dst].write(record):
            end = end or time.monotonic() + self.deadline
            self._hope_for(dst, end)
            self._look()
            time.sleep(NAP_SECONDS)

    def _sent(self, outgoing: Outgoing, count: int, end: float) -> None:
        """Stays until so many chunks are sent, or all."""
        count = min(count, outgoing.count)
        if outgoing.sent < count:
            self._until(lambda: outgoing.sent >= count, outgoing.readers, end)

    # ---- receiving ---------------------------------------------------------------------------------------

    def _copied(
        self, into: Sequence[tuple[int, Sequence[Tensor]]], outgoing: Sequence[Outgoing], tag: int, end: float
    ) -> None:
        """Takes the messages of some ranks into place; what this rank sends is then under way to its end."""
        for k in range(max(len(slots) for _, slots in into)):
            for src, slots in into:
                if k < len(slots):
                    record = self._take(src, tag, slots[k], end)
                    slots[k].copy_(self._view(src, record, slots[k]))
                    self._read(src, record)
        for one in outgoing:
            self._sent(one, one.count, end)

    def _added(
        self, operation: Operation, mine: Tensor, out: Tensor, outgoing: Sequence[Outgoing], tag: int, end: float
    ) -> None:
        """Reduces what the others send, and ``mine``, into ``out``."""
        group = operation.group
        for k, (part, into) in enumerate(zip(chunks(mine), chunks(out), strict=True)):
            records = {src: self._take(src, tag, part, end) for src in group.ranks if src != group.rank}
            for one in outgoing:  # else out, if it is mine, changes too early
                self._sent(one, k + 1, end)
            stack = [part if src == group.rank else self._view(src, records[src], part) for src in group.ranks]
            ordered_sum(stack, group.sizes, operation.op, into)
            for src, record in records.items():
                self._read(src, record)

    def _take(self, src: int, tag: int, like: Tensor, end: float) -> MailRecord:
        """The next message of a rank with a tag, by ``end``; it is as long as ``like``."""
        early = self._early[src, tag]
        if not early:
            self._until(lambda: bool(early), (src,), end)
        record = early.popleft()
        if not early:
            del self._early[src, tag]
        if record.nbytes != like.nbytes or record.dtype != CODES[like.dtype]:
            sent = f"{record.nbytes} bytes of {name_of(DTYPES[record.dtype])}"
            raise ConnectionError(f"rank {src} sent {sent} where {like.nbytes} of {name_of(like.dtype)} were meant")
        return record

    def _until(self, done: Callable[[], bool], sources: Sequence[int], end: float) -> None:
        """Takes in what comes until it is done: looks at first, then sleeps.

        Members of several groups may wait for them in different orders, so after a while without an end the windows are
        opened: then all is under way that was begun.
        """
        first = self._office.inboxes[sources[0]]
        spin = time.perf_counter() + self._spin
        patience = time.monotonic() + LOOK_SECONDS
        while not done():
            if any(map(self._drain, sources)) or time.perf_counter() < spin:
                continue
            for src in sources:
                self._hope_for(src, end)
            nap = NAP_SECONDS if self._unsent or len(sources) > 1 else LOOK_SECONDS
            if first.filled.wait(min(nap, max(0.001, end - time.monotonic()))):
                self._sort_in(sources[0])
            else:
                self._look()
            if self._unsent and time.monotonic() > patience:
                for outgoing in list(self._unsent.values()):
                    self._pump(outgoing, all_of_it=True)

    def _drain_all(self) -> None:
        """Takes in what has come from anybody: blocks that were read can be used again."""
        for src in self._office.inboxes:
            self._drain(src)

    def _drain(self, src: int) -> bool:
        """Takes in what has come from a rank; whether anything had."""
        inbox, found = self._office.inboxes[src], False
        while inbox.filled.take():
            self._sort_in(src)
            found = True
        return found

    def _sort_in(self, src: int) -> None:
        """Takes in a record, whose ``filled`` was taken."""
        inbox = self._office.inboxes[src]
        record = inbox.read()
        if record.kind == DATA:
            self._open(src, record)  # while its owner, who waits for room, still has it
        inbox.room.post()
        if record.kind == DATA and src not in self._gone:
            self._early[src, record.tag].append(record)
        elif record.kind == READ:
            block = self._arena.read(record.descriptor, record.offset)
            if block is not None and isinstance(outgoing := block.outgoing, Outgoing):
                block.outgoing = None
                outgoing.unread -= 1
                self._pump(outgoing)
        elif record.kind == HERE:
            self._here.add(src)
        elif record.kind == LEFT:
            self._gone[src] = f"rank {src} has left"

    def _open(self, src: int, record: MailRecord) -> None:
        """The segment in which a message lies."""
        try:
            self._office.segment(src, record.descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH, errno.ESTALE):
                raise ConnectionError(f"the memory of rank {src} cannot be opened ({error.strerror})") from error
            self._gone.setdefault(src, f"the process of rank {src} has ended")

    def _look(self) -> None:
        """Takes in what has come from anybody, and who has ended."""
        ended = self._office.ended()
        self._drain_all()
        for src in ended:
            self._gone.setdefault(src, f"the process of rank {src} has ended")

    def _hope_for(self, rank: int, end: float) -> None:
        """Raises if nothing more will come from a rank, or the time is up."""
        if rank in self._gone:
            raise ConnectionResetError(self._gone[rank])
        if time.monotonic() > end:
            raise TimeoutError(f"rank {rank} did not come")

    def _view(self, src: int, record: MailRecord, like: Tensor) -> Tensor:
        """What has come, where it lies."""
        return self._office.segment(src, record.descriptor).view(record.offset, like.numel(), like.dtype)

    def _read(self, src: int, record: MailRecord) -> None:
        """Gives the block back, where somebody still wants it."""
        if src not in self._gone:
            self._post(src, MailRecord(READ, 0, record.descriptor, record.offset))


def chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Parts of a 1-D tensor, none where it is empty."""
    if tensor.nbytes <= CHUNK_BYTES:
        return (tensor,) if tensor.numel() else ()
    return torch.split(tensor, CHUNK_BYTES // tensor.element_size())
