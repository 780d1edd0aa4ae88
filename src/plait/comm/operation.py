"""One operation as one rank requests it.

A ``Group`` is the ranks of a collective seen from one of them; an ``Operation`` is their common action.  Errors name
it like this:

    sum reduce_scatter of unit 'blocks.3' over shard (4096 x float32, phase 'microbatch', microbatch 0)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from plait.table.collectives import Entry, Note

if TYPE_CHECKING:
    from plait.comm.base import Comm

NO_NOTE: Final = Note()


class MismatchError(RuntimeError):
    """Two ranks met in one operation with different meanings."""


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Returns when the operation's tensors may be read and written again."""


class Done:
    """The work of an operation that is complete when it is issued."""

    def wait(self) -> None:
        return


DONE: Final = Done()


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share one collective, seen from one of them."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    """The index of this rank in ``ranks``."""
    sizes: tuple[int, ...]
    """The size of each axis."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.ranks[self.index]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as one rank requests it; members of a group must agree on its ``meaning``."""

    kind: str
    group: Group
    note: Note
    numel: int
    """Elements of the whole array."""
    dtype: torch.dtype
    op: str = ""
    root: int = -1
    """The root's index within the group (broadcast, reduce, scatter, gather)."""
    kept: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Left by a transport for the next start, on the same tensors."""

    @property
    def meaning(self) -> tuple[object, ...]:
        return self.kind, self.group.axes, self.numel, self.dtype, self.op, self.root, self.note.phase, self.note.unit

    def __str__(self) -> str:
        note, group = self.note, self.group
        text = f"{self.op} {self.kind}".lstrip()
        text += f" of unit {note.unit!r}" if note.unit else ""
        text += f" over {', '.join(group.axes) or 'no axes'}"
        text += f" with root {group.ranks[self.root]}" if self.root >= 0 else ""
        about = f"{self.numel} x {name_of(self.dtype)}"
        about += f", phase {note.phase!r}" if note.phase else ""
        about += f", microbatch {note.microbatch}" if note.microbatch >= 0 else ""
        return f"{text} ({about})"


@dataclass(frozen=True, slots=True)
class Prepared:
    """An operation of a group with other members, checked once and begun any number of times, on the same tensors.

    A step requests the same operations every time, and checking one costs as much as a small message.
    """

    comm: Comm
    entry: Entry
    """The operation's line in the ledger."""
    operation: Operation
    what: Sequence[Tensor | int | None]
    """The tensors, and the other rank of a message."""
    method: Callable[..., Work]
    """The world's own method that moves the tensors."""

    def start(self) -> Work:
        """Begins the operation."""
        return self.comm.begin(self)


@dataclass(frozen=True, slots=True)
class Alone:
    """A prepared operation in a group of one, which has no member to send to."""

    start: Callable[[], Work] = lambda: DONE
    """Copies the piece if it must be elsewhere."""


class InTurn:
    """Messages of several moves under way: each move's messages start once those of the move before were waited for."""

    def __init__(self, moves: Sequence[Sequence[Prepared | Alone]]) -> None:
        self._rest = deque(moves)
        self._works = [message.start() for message in self._rest.popleft()]

    def wait(self) -> None:
        """Waits for all messages."""
        for work in self._works:
            work.wait()
        self._works = []
        while self._rest:
            for work in [message.start() for message in self._rest.popleft()]:
                work.wait()


def start(moves: Sequence[Sequence[Prepared | Alone]]) -> list[Work]:
    """Starts the messages of some moves; waiting for the returned works starts those of further moves."""
    if len(moves) > 1:
        return [InTurn(moves)]
    return [message.start() for messages in moves for message in messages]


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def copied(out: Tensor, piece: Tensor) -> Work:
    """Copies the values of ``piece`` into ``out``, which may be the same memory: a group of one does no more."""
    if out.data_ptr() != piece.data_ptr():
        out.copy_(piece)
    return DONE
