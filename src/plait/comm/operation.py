"""One operation as one rank requests it, and the checks before anything moves.

A ``Group`` is the ranks of a collective seen from one of them; an ``Operation`` is their common action.  Errors name
it like this:

    sum all_reduce of unit 'blocks.3' over shard (4096 x float32, phase 'backward', microbatch 0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from plait.comm.ordered_reduce import OPS
from plait.table.collectives import Entry, Note
from plait.table.mesh import AXES, Mesh

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


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def label(tensor: Tensor) -> str:
    """``float32 (3, 4)``: what the two sides of a message must agree on."""
    return f"{name_of(tensor.dtype)} {tuple(tensor.shape)}"


def group_of(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> Group:
    if len(set(axes)) != len(axes):
        raise ValueError(f"an axis is given twice in {axes}: name each axis once")
    return Group(axes, mesh.group(rank, axes), mesh.index(rank, axes), tuple(mesh.axis(a) for a in axes))


def pair_of(mesh: Mesh, rank: int, kind: str, peer: int) -> Group:
    """Returns the group of this rank and another, the sender first, with the axes along which they differ."""
    if not 0 <= peer < mesh.size or peer == rank:
        raise ValueError(
            f"{kind} between rank {rank} and rank {peer} on the mesh {mesh}: "
            f"the other rank is one of 0 to {mesh.size - 1}, and not {rank} itself"
        )
    here, there = mesh.coordinates(rank), mesh.coordinates(peer)
    ranks = (rank, peer) if kind == "send" else (peer, rank)
    apart = tuple(a for a in AXES if here[a] != there[a])
    if mesh.context > 1 and peer in mesh.group(rank, ("context",)):
        apart = ("context",)
    return Group(apart, ranks, ranks.index(rank), (2,))


def flat(tensor: Tensor, name: str, kind: str, device: torch.device) -> Tensor:
    """Returns the tensor as 1-D; refuses it unless it is contiguous and on the CPU or the device of this world."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{kind}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous: call .contiguous() first, and copy back where it is written"
        )
    if tensor.device.type not in (device.type, "cpu"):
        raise ValueError(f"{kind}: {name} is on {tensor.device}, this world moves {device} tensors")
    if tensor.dim() == 1 and not tensor.requires_grad and type(tensor) is Tensor:
        return tensor
    return tensor.detach().view(-1)


def same_kind(kind: str, a: Tensor, b: Tensor) -> None:
    """Refuses tensors of two dtypes, or on two devices."""
    if a.device.type != b.device.type:
        raise ValueError(f"{kind} between {a.device} and {b.device}: bring both to one device first")
    if a.dtype != b.dtype:
        raise ValueError(f"{kind} between {name_of(a.dtype)} and {name_of(b.dtype)}: convert one to the other first")


def check_pieces(kind: str, group: Group, whole: Tensor, whole_name: str, piece: Tensor, piece_name: str) -> None:
    """Refuses a whole that is not ``n`` pieces, and a piece that overlaps it outside this rank's slice."""
    same_kind(kind, whole, piece)
    n, m = len(group.ranks), piece.numel()
    if whole.numel() != n * m:
        raise ValueError(
            f"{kind} over {names(group)}: {whole_name} has {whole.numel()} elements, but {n} x "
            f"{piece_name} of {m} makes {n * m}; pad to equal pieces"
        )
    if overlap(whole, piece):
        offset = (piece.data_ptr() - whole.data_ptr()) // piece.element_size()
        if offset != group.index * m:
            raise ValueError(
                f"{kind} over {names(group)}: {piece_name} begins at element {offset} of {whole_name}; rank "
                f"{group.rank} is member {group.index}, whose slice starts at {group.index * m}"
            )


def names(group: Group) -> str:
    return f"{', '.join(group.axes)} ({len(group.ranks)} ranks)"


def known_op(op: str, kind: str) -> None:
    """Refuses unknown reductions, and the mean."""
    if op.lower() in ("avg", "mean", "average"):
        raise ValueError(f"{kind} with op {op!r}: SUM only, divide yourself (once, by the global count)")
    if op not in OPS:
        raise ValueError(f"{kind} with unknown op {op!r}: use one of {', '.join(OPS)}")


def known_root(kind: str, group: Group, root: int) -> None:
    if not 0 <= root < len(group.ranks):
        raise ValueError(
            f"{kind} over {names(group)} with root {root}: the root is an index within the group, "
            f"0 to {len(group.ranks) - 1} here, for the ranks {group.ranks}"
        )


def overlap(whole: Tensor, piece: Tensor) -> bool:
    if not piece.numel():
        return False
    start = piece.data_ptr() - whole.data_ptr()
    return -piece.numel() * piece.element_size() < start < whole.numel() * whole.element_size()


def copied(out: Tensor, piece: Tensor) -> Work:
    """Copies the values of ``piece`` into ``out``, which may be the same memory: a group of one does no more."""
    if out.data_ptr() != piece.data_ptr():
        with torch.no_grad():
            out.copy_(piece)
    return DONE
