"""Messages under way between processes: their tags, their headers, and what waiting for them does.

    Pending    messages, then something to finish (a fold)
    Headed     a header beside the message: what the sender says that it is
      Receive      it is checked; then the message itself
      Unforeseen   it tells what to make room for; then the message
    Sent       the handle of a message that goes, whether the handle is kept or not
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

    @property
    def is_under_way(self) -> bool:
        """Whether nobody has waited for it yet."""
        return self._under_way.get(id(self)) is self

    def wait(self) -> None:
        """Joins the messages, then finishes; a second time nothing."""
        self.finish_by(self._comm.end())

    def finish_by(self, end: float) -> None:
        """``wait``, no longer than to the moment ``end`` (of ``time.monotonic``)."""
        if not self.is_under_way:
            return
        try:
            self._comm.join_works(self._call, self._works, end)
        finally:
            del self._under_way[id(self)]
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
        self._works, self._finish = [], None


class Sent:
    """The handle of a message to another rank.

    The world keeps the message's memory.  Where the handle is dropped, nobody will say that the message has arrived: it
    is noted in ``dropped``.
    """

    def __init__(self, message: Pending, dropped: dict[int, Pending]) -> None:
        self._message, self._dropped = message, dropped

    def wait(self) -> None:
        """The message has been taken in; its memory is free."""
        self._message.wait()

    def __del__(self) -> None:
        if self._message.is_under_way:
            self._dropped[id(self._message)] = self._message


class Headed(Pending):
    """A message beside which a header travels: what the sender says that it is.

    Args:
        first: what brings the header.
    """

    def __init__(self, comm: ProcessComm, call: Call, first: list[Started], header: Tensor) -> None:
        super().__init__(comm, call, first)
        self._header, self._came = header, ""

    def read(self, end: float) -> str:
        """What the header says; waits for it the first time."""
        if not self._came:
            self._comm.join_works(self._call, self._works, end)
            self._came, self._works = bytes(self._header.tolist()).rstrip(b"\0").decode(), []
        return self._came

    def check(self, meant: str, end: float) -> None:
        """Raises MismatchError where the message is another than was asked for."""
        came, (src, dst) = self.read(end), self._call.group.ranks
        if came != meant[:HEADER_BYTES]:
            # The message itself is never taken in; its buffer stays in under_way, where it does no harm.
            both = f"receives {meant} from rank {src}, which sent {came}: make both equal"
            self._comm.last_words.exchange(f"{both} ({self._call})", ())
            raise MismatchError(f"rank {dst} {both} ({self._call})")


class Receive(Headed):
    """A message that was asked for; the header may say that it is another."""

    def __init__(
        self, comm: ProcessComm, call: Call, first: list[Started], header: Tensor, meant: str, rest: list[Started]
    ) -> None:
        super().__init__(comm, call, first, header)
        self._meant, self._rest = meant, rest

    def wait(self) -> None:
        """Checks the header, then joins the message itself; both within one deadline."""
        if not self.is_under_way:
            return
        end = self._comm.end()
        self.check(self._meant, end)
        self._works = self._rest
        self.finish_by(end)


class Unforeseen(Headed):
    """A message whose shape its header tells; it is asked for when the header has come."""

    def __init__(
        self,
        comm: ProcessComm,
        call: Call,
        first: list[Started],
        header: Tensor,
        rest: Callable[[Tensor], list[Started]],
    ) -> None:
        super().__init__(comm, call, first, header)
        self._rest = rest
        self._tensor: Tensor | None = None

    def wait(self) -> Tensor:  # type: ignore[override]
        """Reads the header, makes room, takes the message in; all within one deadline."""
        if self._tensor is None:
            end = self._comm.end()
            dtype, shape = read_label(self.read(end))
            self._tensor = torch.empty(shape, dtype=dtype, device=self._comm.device)
            self._works = self._rest(self._tensor)
            self.finish_by(end)
        return self._tensor


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
