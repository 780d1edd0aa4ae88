"""``Comm``: what the engine may ask of a world.

The engine, the tensors and the scripts speak to this one face; behind it ranks are processes, threads
or nothing at all (a world per file).  The face does what is the same in all of them, and leaves the
moving to the world:

    comm.all_gather(out, piece, ("shard",), note)
        | 1. refuse      sizes that do not multiply, wrong dtype, not contiguous     ValueError
        | 2. group of 1  copy piece -> out where they differ, write no line          DONE
        | 3. write       Entry(kind, axes, bytes, sent, note) into the ledger
        v 4. move        self._all_gather(call, out, piece)                          -> Work

Rules that hold in every world:

- A group's members are ordered by ``mesh.group(rank, axes)``: the first axis outermost.
- Every member asks in the same order.  Tensors are left alone from the call until ``wait()``, and
  every ``Work`` of a collective is waited for, in the same order on all members.
- Reductions are ``sum``, ``min`` or ``max``, folded in the order of ``comm/fold.py``; with
  ``deterministic=False`` a world may take its library's order instead.
- Nothing hangs: what does not come within ``deadline`` seconds is an error that names the operation.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plait.comm.call import (
    DONE,
    NO_NOTE,
    Call,
    Done,
    Group,
    Incoming,
    MismatchError,
    Work,
    copied,
    flat,
    known_op,
    known_root,
    multiplies,
    name_of,
    names,
    overlap,
    same_dtype,
)
from plait.comm.ledger import Ledger
from plait.core.collectives import Entry, Note, bytes_sent
from plait.core.mesh import AXES, Mesh

__all__ = ["DONE", "NO_NOTE", "Call", "Comm", "Done", "Group", "Incoming", "MismatchError", "Work", "name_of"]


OnWait = Callable[[Call, float, float], None]
"""Told what was waited for, and from when to when (``time.perf_counter``)."""


class Comm(ABC):
    """One rank's way to the others.  Subclasses move tensors in the ``_`` methods; all else is here."""

    mesh: Mesh
    rank: int
    device: torch.device
    ledger: Ledger
    deterministic: bool
    deadline: float
    """Seconds that any wait may take."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        *,
        device: torch.device | str = "cpu",
        deadline: float = 30.0,
        deterministic: bool = True,
    ) -> None:
        if not 0 <= rank < mesh.size:
            raise ValueError(f"rank {rank} is not on the mesh {mesh} of {mesh.size} ranks")
        if deadline <= 0:
            raise ValueError(f"a deadline of {deadline} s leaves no time: give seconds above 0")
        self.mesh, self.rank, self.device = mesh, rank, torch.device(device)
        self.ledger, self.deterministic, self.deadline = Ledger(), deterministic, deadline
        self._groups: dict[tuple[str, ...], Group] = {}
        self.on_wait: OnWait | None = None

    @property
    def overlaps(self) -> bool:
        """Whether messages travel beside computation: on GPUs, and where there are more cores than ranks use."""
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", self.mesh.size))
        return self.device.type == "cuda" or (os.cpu_count() or 1) > ranks_here * torch.get_num_threads()

    # ---- the face ------------------------------------------------------------------------------

    def all_gather(self, out: Tensor, piece: Tensor, axes: Sequence[str], note: Note = NO_NOTE) -> Work:
        """Every member's ``piece``, end to end in group order, into every member's ``out``.

        ``piece`` may be the very slice of ``out`` at this rank's index: then nothing is copied.
        """
        return self._pieces("all_gather", out, piece, axes, note, "")

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, axes: Sequence[str], op: str = "sum", note: Note = NO_NOTE
    ) -> Work:
        """The fold of all members' ``whole``, cut in equal pieces; member k keeps piece k in ``out``.

        ``out`` may be the very slice of ``whole`` at this rank's index.
        """
        return self._pieces("reduce_scatter", whole, out, axes, note, op)

    def all_reduce(self, tensor: Tensor, axes: Sequence[str], op: str = "sum", note: Note = NO_NOTE) -> Work:
        """The fold of all members' ``tensor``, in place on every member."""
        return self._one("all_reduce", tensor, axes, note, op)

    def broadcast(self, tensor: Tensor, axes: Sequence[str], src: int, note: Note = NO_NOTE) -> Work:
        """The ``tensor`` of the group's member ``src`` (an index within the group), on every member."""
        return self._one("broadcast", tensor, axes, note, "", src)

    def reduce(self, tensor: Tensor, axes: Sequence[str], dst: int, op: str = "sum", note: Note = NO_NOTE) -> Work:
        """The fold of all members' ``tensor``, in place on member ``dst``; the others' stay as they are."""
        return self._one("reduce", tensor, axes, note, op, dst)

    def scatter(self, out: Tensor, whole: Tensor | None, axes: Sequence[str], src: int, note: Note = NO_NOTE) -> Work:
        """Piece k of member ``src``'s ``whole`` into member k's ``out``; ``whole`` is None off the root."""
        return self._rooted("scatter", whole, out, axes, note, src)

    def gather(self, out: Tensor | None, piece: Tensor, axes: Sequence[str], dst: int, note: Note = NO_NOTE) -> Work:
        """Every member's ``piece``, end to end, into ``out`` of member ``dst``; it is None elsewhere."""
        return self._rooted("gather", out, piece, axes, note, dst)

    def all_to_all(self, out: Tensor, whole: Tensor, axes: Sequence[str], note: Note = NO_NOTE) -> Work:
        """Piece k of ``whole`` to member k; piece k of ``out`` from member k."""
        group = self._group(axes)
        out, whole = (
            flat(out, "out", "all_to_all", self.device),
            flat(whole, "whole", "all_to_all", self.device),
        )
        n = len(group.ranks)
        same_dtype("all_to_all", out, whole)
        if out.numel() != whole.numel() or whole.numel() % n:
            raise ValueError(
                f"all_to_all over {names(group)}: whole has {whole.numel()} elements and out {out.numel()}; "
                f"they must be equal and a multiple of {n}, so pad the pieces to one size"
            )
        if overlap(out, whole) and n > 1:
            raise ValueError("all_to_all cannot write over what it still has to send: give it another out")
        if n == 1:
            return copied(out, whole)
        call = self._record("all_to_all", group, note, whole)
        with torch.no_grad():
            return self._all_to_all(call, out, whole)

    def send(self, tensor: Tensor, dst: int, note: Note = NO_NOTE, *, agreed: bool = False) -> Work:
        """``tensor`` to the (global) rank ``dst``.  Its handle may be dropped: the message still goes.

        Args:
            agreed: both sides have agreed on shape and dtype, so nothing travels beside the message to tell them.
        """
        call = self._message("send", tensor, dst, note)
        with torch.no_grad():
            return self._send(call, tensor, dst, agreed)

    def recv(self, tensor: Tensor, src: int, note: Note = NO_NOTE, *, agreed: bool = False) -> Work:
        """The next message of the (global) rank ``src`` into ``tensor``, complete after ``wait()``.

        ``wait`` raises MismatchError where the sender's shape or dtype is another; between processes, where they were
        ``agreed``, such a message never comes.
        """
        call = self._message("recv", tensor, src, note)
        with torch.no_grad():
            return self._recv(call, tensor, src, agreed)

    def recv_new(self, src: int, note: Note = NO_NOTE) -> Incoming:
        """The next message of the (global) rank ``src``, whatever its shape; ``wait()`` returns it."""
        nothing = torch.empty(0, device=self.device)
        incoming = self._recv_new(Call("recv", self._pair("recv", src), note, 0, nothing.dtype), src)
        return _Recorded(self, incoming, src, note)

    def barrier(self, axes: Sequence[str], note: Note = NO_NOTE) -> None:
        """Returns when every member has come."""
        group = self._group(axes)
        if len(group.ranks) > 1:
            self._barrier(self._record("barrier", group, note, torch.empty(0, dtype=torch.uint8)))

    def check_together(self, error: BaseException | None, axes: Sequence[str]) -> None:
        """Raises on every member if any member brings an error: its own there, a RuntimeError elsewhere.

        A failure that only one rank can see (a file, a NaN) thereby becomes one that all leave by.
        """
        axes, note, width = tuple(axes), Note(phase="check"), 1024
        group = self._group(axes)
        first = torch.tensor([len(group.ranks) if error is None else group.index], dtype=torch.int64)
        first = first.to(self.device)
        self.all_reduce(first, axes, "min", note).wait()
        index = int(first)
        if index == len(group.ranks):
            return
        words = torch.zeros(width, dtype=torch.uint8)
        if error is not None:
            text = f"{type(error).__name__}: {error}".encode()[:width]
            words[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        words = words.to(self.device)
        self.broadcast(words, axes, index, note).wait()
        if error is not None:
            raise error
        told = bytes(words.tolist()).rstrip(b"\0").decode(errors="replace")
        raise RuntimeError(f"rank {group.ranks[index]} failed: {told}")

    def close(self) -> None:
        """Lets go of what the world holds.  No operation may follow."""
        return None

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Around every place where this rank may stand still for others; tells ``on_wait`` how long it did."""
        if self.on_wait is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.on_wait(call, start, time.perf_counter())

    # ---- what a world supplies -----------------------------------------------------------------
    # Tensors are 1-D here, and the group has at least two members.

    @abstractmethod
    def _all_gather(self, call: Call, out: Tensor, piece: Tensor) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, call: Call, out: Tensor, whole: Tensor) -> Work: ...

    @abstractmethod
    def _all_reduce(self, call: Call, tensor: Tensor) -> Work: ...

    @abstractmethod
    def _broadcast(self, call: Call, tensor: Tensor) -> Work: ...

    @abstractmethod
    def _reduce(self, call: Call, tensor: Tensor) -> Work: ...

    @abstractmethod
    def _scatter(self, call: Call, out: Tensor, whole: Tensor | None) -> Work: ...

    @abstractmethod
    def _gather(self, call: Call, out: Tensor | None, piece: Tensor) -> Work: ...

    @abstractmethod
    def _all_to_all(self, call: Call, out: Tensor, whole: Tensor) -> Work: ...

    @abstractmethod
    def _send(self, call: Call, tensor: Tensor, dst: int, agreed: bool) -> Work: ...

    @abstractmethod
    def _recv(self, call: Call, tensor: Tensor, src: int, agreed: bool) -> Work: ...

    @abstractmethod
    def _recv_new(self, call: Call, src: int) -> Incoming: ...

    @abstractmethod
    def _barrier(self, call: Call) -> None: ...

    # ---- checking and recording ----------------------------------------------------------------

    def _group(self, axes: Sequence[str]) -> Group:
        axes = tuple(axes)
        group = self._groups.get(axes)
        if group is None:
            if len(set(axes)) != len(axes):
                raise ValueError(f"an axis stands twice in {axes}: name each axis once")
            sizes = tuple(self.mesh.axis(a) for a in axes)
            group = Group(axes, self.mesh.group(self.rank, axes), self.mesh.index(self.rank, axes), sizes)
            self._groups[axes] = group
        return group

    def _record(self, kind: str, group: Group, note: Note, whole: Tensor, op: str = "", root: int = -1) -> Call:
        return self._write(kind, group, note, whole.numel(), whole.dtype, op, root)

    def _write(self, kind: str, group: Group, note: Note, numel: int, dtype: torch.dtype, op: str, root: int) -> Call:
        size = numel * dtype.itemsize
        sent = bytes_sent(kind, size, len(group.ranks), root=root == group.index)
        self.ledger.add(Entry(kind, group.axes, size, sent, note))
        return Call(kind, group, note, numel, dtype, op, root)

    def _pieces(self, kind: str, whole: Tensor, piece: Tensor, axes: Sequence[str], note: Note, op: str) -> Work:
        """all_gather and reduce_scatter: a whole on one side, equal pieces of it on the other."""
        group = self._group(axes)
        n, gather = len(group.ranks), kind == "all_gather"
        whole_name, piece_name = ("out", "piece") if gather else ("whole", "out")
        whole, piece = flat(whole, whole_name, kind, self.device), flat(piece, piece_name, kind, self.device)
        if not gather:
            known_op(op, kind)
        multiplies(kind, group, whole, whole_name, piece, piece_name)
        if n == 1:
            return copied(whole, piece) if gather else copied(piece, whole)
        if overlap(whole, piece):
            offset = (piece.data_ptr() - whole.data_ptr()) // piece.element_size()
            if offset != group.index * piece.numel():
                raise ValueError(
                    f"{kind} over {names(group)}: {piece_name} lies in {whole_name} at element {offset}; "
                    f"rank {self.rank} is member {group.index}, whose slice starts at "
                    f"{group.index * piece.numel()}"
                )
        call = self._record(kind, group, note, whole, op)
        with torch.no_grad():
            if gather:
                return self._all_gather(call, whole, piece)
            return self._reduce_scatter(call, piece, whole)

    def _one(
        self, kind: str, tensor: Tensor, axes: Sequence[str], note: Note, op: str, root: int | None = None
    ) -> Work:
        """all_reduce, broadcast and reduce: one tensor, in place."""
        group = self._group(axes)
        tensor = flat(tensor, "tensor", kind, self.device)
        if kind != "broadcast":
            known_op(op, kind)
        if root is not None:
            known_root(kind, group, root)
        if len(group.ranks) == 1:
            return DONE
        call = self._record(kind, group, note, tensor, op, -1 if root is None else root)
        with torch.no_grad():
            if kind == "all_reduce":
                return self._all_reduce(call, tensor)
            return self._broadcast(call, tensor) if kind == "broadcast" else self._reduce(call, tensor)

    def _rooted(
        self, kind: str, whole: Tensor | None, piece: Tensor, axes: Sequence[str], note: Note, root: int
    ) -> Work:
        """scatter and gather: the whole on the root only."""
        group = self._group(axes)
        whole_name, piece_name = ("whole", "out") if kind == "scatter" else ("out", "piece")
        known_root(kind, group, root)
        piece = flat(piece, piece_name, kind, self.device)
        if group.index == root:
            if whole is None:
                raise ValueError(f"{kind}: rank {self.rank} is the root and needs {whole_name}, not None")
            whole = flat(whole, whole_name, kind, self.device)
            multiplies(kind, group, whole, whole_name, piece, piece_name)
            if len(group.ranks) == 1:
                return copied(piece, whole) if kind == "scatter" else copied(whole, piece)
        elif whole is not None:
            raise ValueError(
                f"{kind}: rank {self.rank} is not the root (that is rank {group.ranks[root]}): "
                f"{whole_name} is None here"
            )
        call = self._write(kind, group, note, piece.numel() * len(group.ranks), piece.dtype, "", root)
        with torch.no_grad():
            if kind == "scatter":
                return self._scatter(call, piece, whole)
            return self._gather(call, whole, piece)

    def _message(self, kind: str, tensor: Tensor, peer: int, note: Note) -> Call:
        """send and recv: recorded under the axes along which the two ranks lie apart."""
        flat(tensor, "tensor", kind, self.device)
        return self._record(kind, self._pair(kind, peer), note, tensor)

    def _pair(self, kind: str, peer: int) -> Group:
        """This rank and another, the sender first."""
        if not 0 <= peer < self.mesh.size or peer == self.rank:
            raise ValueError(
                f"{kind} between rank {self.rank} and rank {peer} on the mesh {self.mesh}: "
                f"the other rank is one of 0 to {self.mesh.size - 1}, and not {self.rank} itself"
            )
        here, there = self.mesh.coordinates(self.rank), self.mesh.coordinates(peer)
        axes = tuple(a for a in AXES if here[a] != there[a])
        ranks = (self.rank, peer) if kind == "send" else (peer, self.rank)
        return Group(axes, ranks, ranks.index(self.rank), (2,))


class _Recorded:
    """A message of unknown shape, which stands in the ledger once it has come."""

    def __init__(self, comm: Comm, incoming: Incoming, src: int, note: Note) -> None:
        self._comm, self._incoming, self._src, self._note = comm, incoming, src, note

    def wait(self) -> Tensor:
        """The message."""
        tensor = self._incoming.wait()
        self._comm._message("recv", tensor, self._src, self._note)
        return tensor
