"""One operation as one rank means it, and what is refused before anything moves.

A ``Group`` is the ranks of a collective seen from one of them; a ``Call`` is the operation itself.  The
members of a group must agree on ``Call.meaning``; ``str(call)`` is how errors name it:

    sum all_reduce of unit 'blocks.3' over shard (4096 x float32, phase 'backward', microbatch 0)

The functions below turn a user's mistake into a ValueError that holds the numbers and the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from plait.comm.fold import OPS
from plait.core.collectives import Note

NO_NOTE: Final = Note()


class MismatchError(RuntimeError):
    """Two ranks met in one operation and meant different things."""


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Returns when the operation's tensors may be read and written again."""


class Incoming(Protocol):
    """A message under way whose shape only its sender knows."""

    def wait(self) -> Tensor:
        """Returns the message when it has come."""


class Done:
    """The work of an operation that was complete when it was issued."""

    def wait(self) -> None:
        """Returns at once."""


DONE: Final = Done()


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share one collective, seen from one of them."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    """Where this rank stands among ``ranks``."""
    sizes: tuple[int, ...]
    """The size of each axis."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation as one rank means it; members of a group must mean the same."""

    kind: str
    group: Group
    note: Note
    numel: int
    """Elements of the whole array."""
    dtype: torch.dtype
    op: str = ""
    root: int = -1
    """The root's index within the group (broadcast, reduce, scatter, gather)."""

    @property
    def meaning(self) -> tuple[object, ...]:
        """What all members must agree on."""
        note = self.note
        return (self.kind, self.group.axes, self.numel, self.dtype, self.op, self.root, note.phase, note.unit)

    def __str__(self) -> str:
        note, words = self.note, [f"{self.op + ' ' if self.op else ''}{self.kind}"]
        if note.unit:
            words.append(f"of unit {note.unit!r}")
        words.append(f"over {', '.join(self.group.axes) or 'no axes'}")
        if self.root >= 0:
            words.append(f"with root {self.group.ranks[self.root]}")
        about = [f"{self.numel} x {name_of(self.dtype)}"]
        if note.phase:
            about.append(f"phase {note.phase!r}")
        if note.microbatch >= 0:
            about.append(f"microbatch {note.microbatch}")
        return f"{' '.join(words)} ({', '.join(about)})"


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def flat(tensor: Tensor, name: str, kind: str, device: torch.device) -> Tensor:
    """The tensor as 1-D, where it is contiguous and on the device of this world."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{kind}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous: call .contiguous() first, and copy back where it is written"
        )
    if tensor.device.type != device.type:
        raise ValueError(f"{kind}: {name} is on {tensor.device}, this world moves {device} tensors")
    return tensor.detach().view(-1)


def same_dtype(kind: str, a: Tensor, b: Tensor) -> None:
    """Refuses two sides of different types."""
    if a.dtype != b.dtype:
        raise ValueError(f"{kind} between {name_of(a.dtype)} and {name_of(b.dtype)}: convert one to the other first")


def multiplies(kind: str, group: Group, whole: Tensor, whole_name: str, piece: Tensor, piece_name: str) -> None:
    """Refuses a whole that is not ``n`` pieces."""
    same_dtype(kind, whole, piece)
    n = len(group.ranks)
    if whole.numel() != n * piece.numel():
        raise ValueError(
            f"{kind} over {names(group)}: {whole_name} has {whole.numel()} elements, but {n} x "
            f"{piece_name} of {piece.numel()} makes {n * piece.numel()}; pad to equal pieces"
        )


def names(group: Group) -> str:
    """The axes and the number of ranks, for messages."""
    return f"{', '.join(group.axes)} ({len(group.ranks)} ranks)"


def known_op(op: str, kind: str) -> None:
    """Refuses what is no reduction, and the mean."""
    if op in OPS:
        return
    if op.lower() in ("avg", "mean", "average"):
        raise ValueError(f"{kind} with op {op!r}: SUM only, divide yourself (once, by the global count)")
    raise ValueError(f"{kind} with unknown op {op!r}: use one of {', '.join(OPS)}")


def known_root(kind: str, group: Group, root: int) -> None:
    """Refuses a root outside the group."""
    if not 0 <= root < len(group.ranks):
        raise ValueError(
            f"{kind} over {names(group)} with root {root}: the root is an index within the group, "
            f"0 to {len(group.ranks) - 1} here, for the ranks {group.ranks}"
        )


def overlap(whole: Tensor, piece: Tensor) -> bool:
    """Whether the piece lies in the memory of the whole."""
    if whole.device.type == "meta" or not piece.numel():
        return False
    start = piece.data_ptr() - whole.data_ptr()
    return -piece.numel() * piece.element_size() < start < whole.numel() * whole.element_size()


def copied(out: Tensor, piece: Tensor) -> Work:
    """What any collective is in a group of one."""
    if out.device.type != "meta" and out.data_ptr() != piece.data_ptr():
        with torch.no_grad():
            out.copy_(piece)
    return DONE
