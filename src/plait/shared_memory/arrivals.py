"""Copies and adds the chunks that have arrived; nothing here waits.

    Copying     chunks of some ranks into place                     all_gather, all_to_all, recv
    Adding      chunk k of all members, and mine, into one          reduce_scatter, all_reduce
                back: the sum replaces each chunk at its source     all_reduce of large tensors
    Hearing     others have written their pieces of common memory   all_gather of such memory

A rank that waits for one arrival advances the others too, because other ranks may wait for them elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from plait.comm.operation import Operation
from plait.comm.ordered_reduce import ordered_sum
from plait.shared_memory.common import CommonMemory
from plait.shared_memory.mailbox import MailRecord
from plait.shared_memory.outgoing import Outgoing

if TYPE_CHECKING:
    from plait.shared_memory.transport import SharedMemoryTransport


class Arrival(Protocol):
    """A part of an operation."""

    def advance(self) -> bool:
        """Advances as far as it can without waiting; returns True when it is complete."""

    def waits_for(self) -> list[int]:
        """Returns the ranks that must still send something, at least one until it is complete."""


class Copying:
    """Copies messages of some ranks into slots, and sends this rank's own to others."""

    def __init__(
        self,
        mail: SharedMemoryTransport,
        slots: Mapping[int, Sequence[Tensor]],
        outgoing: Sequence[Outgoing],
        tag: int,
    ) -> None:
        self._mail, self._tag, self._outgoing = mail, tag, list(outgoing)
        self._slots = {src: deque(chunks) for src, chunks in slots.items() if chunks}

    def advance(self) -> bool:
        for src, slots in list(self._slots.items()):
            while slots and (record := self._mail.take(src, self._tag, slots[0])) is not None:
                slots[0].copy_(self._mail.view(src, record, slots.popleft()))
                self._mail.read(src, record)
            if not slots:
                del self._slots[src]
        return not self._slots and all(one.is_over for one in self._outgoing)

    def waits_for(self) -> list[int]:
        return [*self._slots, *_readers(self._outgoing)]


class Adding:
    """Reduces every member's chunk k and this rank's own, in the members' order, one chunk after the other.

    Args:
        back: each sum is also written over the others' chunks.
    """

    def __init__(
        self,
        mail: SharedMemoryTransport,
        operation: Operation,
        parts: Sequence[Tensor],
        into: Sequence[Tensor],
        outgoing: Sequence[Outgoing],
        tag: int,
        *,
        back: bool = False,
    ) -> None:
        self._mail, self._operation, self._outgoing, self._tag = mail, operation, list(outgoing), tag
        self._parts, self._into, self._back = parts, into, back
        self._next, self._come = 0, dict[int, MailRecord]()
        group = operation.group
        self._others = [rank for rank in group.ranks if rank != group.rank]

    def advance(self) -> bool:
        while self._next < len(self._parts) and self._has_all():
            self._add(self._parts[self._next], self._into[self._next])
            self._next += 1
            self._come.clear()
        return self._next == len(self._parts) and all(one.is_over for one in self._outgoing)

    def _has_all(self) -> bool:
        """True if the next chunk of all members has come, and this rank's chunk, which the sum may replace, is sent."""
        for src in self._others:
            if src not in self._come:
                record = self._mail.take(src, self._tag, self._parts[self._next])
                if record is not None:
                    self._come[src] = record
        sent = all(one.lent or one.back or one.sent >= min(self._next + 1, one.count) for one in self._outgoing)
        return sent and len(self._come) == len(self._others)

    def _add(self, part: Tensor, into: Tensor) -> None:
        group = self._operation.group
        come = {src: self._mail.view(src, record, part) for src, record in self._come.items()}
        stack = [part if rank == group.rank else come[rank] for rank in group.ranks]
        ordered_sum(stack, group.sizes, self._operation.op, into)
        for src, record in self._come.items():
            if self._back:
                come[src].copy_(into)
            self._mail.read(src, record)

    def waits_for(self) -> list[int]:
        missing = [src for src in self._others if src not in self._come] if self._next < len(self._parts) else []
        return missing or _readers(self._outgoing)


class Hearing:
    """Waits for the messages that others have written their pieces of a generation."""

    def __init__(self, memory: CommonMemory, generation: int) -> None:
        self._memory, self._generation = memory, generation

    def advance(self) -> bool:
        return not self.waits_for()

    def waits_for(self) -> list[int]:
        return self._memory.silent(self._generation)


def _readers(outgoing: Iterable[Outgoing]) -> list[int]:
    return [reader for one in outgoing if not one.is_over for reader in one.waits_for()]
