"""Messages under way between processes: their tags, their headers, and what waiting for them does.

    Pending    messages, then something to finish (a fold)
    Receive    a header, checked; then the message itself
    Unforeseen a header, which tells what to make room for; then the message
    TwoPhase   a large all-reduce: reduce-scatter, then all-gather

A tag is a checksum of what a message means, so messages of different meaning never meet.  torch's handles
and the memory they work on are held until they are waited for, even where the user drops the handle.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.comm.base import Call, MismatchError, name_of

if TYPE_CHECKING:
    from plait.comm.process import ProcessComm

HEADER_BYTES = 128

Started = tuple[Any, Tensor]
"""A handle of torch and the memory it works on, which must live as long."""


class Pending:
    """Messages under way, and what is to be done when they are through."""

    def __init__(
        self,
        comm: ProcessComm,
        call: Call,
        works: list[Started],
        finish: Callable[[], None] | None = None,
        under_way: dict[int, Pending] | None = None,
    ) -> None:
        self._comm, self._call, self._works, self._finish = comm, call, works, finish
        self._under_way = comm.under_way if under_way is None else under_way
        self._under_way[id(self)] = self

    def wait(self) -> None:
        """Joins the messages, then finishes; a second time nothing."""
        if self._under_way.get(id(self)) is not self:
            return
        try:
            self._comm.join_works(self._call, self._works)
        finally:
            del self._under_way[id(self)]
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
        self._works, self._finish = [], None


class Receive(Pending):
    """A message that was asked for.  Its header comes first and may say that it is another."""

    def __init__(
        self,
        comm: ProcessComm,
        call: Call,
        first: list[Started],
        header: Tensor,
        meant: str,
        rest: Callable[[], list[Started]],
    ) -> None:
        super().__init__(comm, call, first)
        self._header, self._meant, self._rest = header, meant, rest

    def wait(self) -> None:
        """Checks the header, then joins the message itself."""
        if self._under_way.get(id(self)) is not self:
            return
        comm, (src, dst) = self._comm, self._call.group.ranks
        comm.join_works(self._call, self._works)
        came = bytes(self._header.tolist()).rstrip(b"\0").decode()
        if came != self._meant[:HEADER_BYTES]:
            # The message itself is never taken in; its buffer stays in under_way, where it does no harm.
            both = f"receives {self._meant} from rank {src}, which sent {came}: make both equal"
            comm.last_words.exchange(f"{both} ({self._call})", ())
            raise MismatchError(f"rank {dst} {both} ({self._call})")
        self._works = self._rest()
        super().wait()


class Unforeseen(Pending):
    """A message whose shape its header tells; it is asked for when the header has come."""

    def __init__(
        self,
        comm: ProcessComm,
        call: Call,
        first: list[Started],
        header: Tensor,
        rest: Callable[[Tensor], list[Started]],
    ) -> None:
        super().__init__(comm, call, first)
        self._header, self._rest = header, rest

    def wait(self) -> Tensor:  # type: ignore[override]
        """Reads the header, makes room, takes the message in."""
        self._comm.join_works(self._call, self._works)
        dtype, shape = read_label(bytes(self._header.tolist()).rstrip(b"\0").decode())
        tensor = torch.empty(shape, dtype=dtype, device=self._comm.device)
        self._works = self._rest(tensor)
        super().wait()
        return tensor


class TwoPhase(Pending):
    """A large all-reduce: reduce-scatter, and in ``wait`` all-gather.

    The second phase starts when this rank waits, so several of one group finish in the order of issue,
    whichever is waited for first: otherwise two ranks could wait for each other.
    """

    def __init__(self, comm: ProcessComm, call: Call, tensor: Tensor, queue: deque[TwoPhase]) -> None:
        n = len(call.group.ranks)
        chunk = -(-tensor.numel() // n)
        self._slices = [tensor[k * chunk : (k + 1) * chunk] for k in range(n)]
        mine = self._slices[call.group.index]
        buffer, stack = comm.receive_stack(call, mine)
        self._tag, self._queue = comm.tag(call), queue
        works = comm.exchange(call, self._tag, stack, self._slices)
        super().__init__(comm, call, works, lambda: comm.fold(call, stack, mine, buffer))
        self._second_tag = comm.tag(call)
        queue.append(self)

    def wait(self) -> None:
        """Finishes all earlier ones of the group, then this one."""
        while self in self._queue:
            first = self._queue.popleft()
            if first is self:
                super().wait()
                mine = [self._slices[self._call.group.index]] * len(self._slices)
                again = self._comm.exchange(self._call, self._second_tag, self._slices, mine)
                Pending(self._comm, self._call, again).wait()
                return
            self._queue.appendleft(first)
            first.wait()


def cut(whole: Tensor, n: int) -> list[Tensor]:
    """Equal pieces, also of nothing."""
    piece = whole.numel() // n
    return [whole[k * piece : (k + 1) * piece] for k in range(n)]


def label(tensor: Tensor) -> str:
    """What both sides of a message must agree on."""
    return f"{name_of(tensor.dtype)} {tuple(tensor.shape)}"


def read_label(text: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """What ``label`` wrote."""
    name, _, shape = text.partition(" ")
    return getattr(torch, name), tuple(int(size) for size in shape.strip("()").split(",") if size.strip())


def checksum(*parts: object) -> int:
    """A tag of 31 bits.  Python's own hash differs from process to process; this one does not."""
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF


def header_of(tensor: Tensor) -> Tensor:
    """The label as bytes, at a fixed size."""
    header, text = torch.zeros(HEADER_BYTES, dtype=torch.uint8), label(tensor).encode()[:HEADER_BYTES]
    header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return header
