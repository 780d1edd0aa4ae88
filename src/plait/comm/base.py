"""``Comm``: the operations that the engine may request from a world.

The engine, the tensors and the scripts use this one interface, whether ranks are processes or threads.
It does the work that all worlds share, and leaves moving tensors to the world:

    comm.all_gather(out, piece, ("shard",), note)
        | 1. refuse      sizes that do not multiply, wrong dtype, not contiguous     ValueError
        | 2. group of 1  copy piece -> out where they differ, write no line          DONE
        | 3. record      Entry(kind, axes, bytes, sent, note) in the ledger
        v 4. move        self._all_gather(operation, out, piece)                          -> Work

Rules of every world:

- A group's members are ordered by ``mesh.group(rank, axes)``: the first axis outermost.
- Every member requests operations in the same order.  Tensors are left alone from the call until ``wait()``, and every
  ``Work`` of a collective is waited for, in the same order on all members.
- Reductions are ``sum``, ``min`` or ``max``, in the order of ``comm/ordered_reduce.py``; with
  ``deterministic=False`` a world may use its library's order instead.
- Nothing hangs: a message that does not come within ``deadline`` seconds is an error that names the operation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.comm.checks import check_meaning, check_pieces, flat, group_of, names, overlap, pair_of, same_kind
from plait.comm.ledger import Ledger
from plait.comm.observer import NOBODY, Observer, Waiting
from plait.comm.operation import DONE, NO_NOTE, Alone, Group, MismatchError, Operation, Prepared, Work, copied
from plait.comm.process_identity import Peer
from plait.table.collectives import Entry, Note, bytes_sent
from plait.table.mesh import Mesh

if TYPE_CHECKING:
    from plait.torch_private import Store

__all__ = ["DONE", "NO_NOTE", "Comm", "MismatchError", "Observer", "Operation", "Work"]


class Comm:
    """One rank's access to its world.  Subclasses move tensors in the ``_`` methods; the rest is here."""

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
        self.data_rank = mesh.data_rank(rank)
        """The index of the part of the batch that this rank reads, of ``mesh.data_size`` parts."""
        self.ledger, self.deterministic, self.deadline = Ledger(), deterministic, deadline
        self.observers: tuple[Observer, ...] = ()
        """Objects that are notified of every step, operation and wait of this rank."""
        self.engine_watchers: tuple[Callable[[Any], Callable[[Any, Any], None]], ...] = ()
        """Called with each new engine of this world; each returns a watcher (``step/watcher.py``)."""
        self.peers: tuple[Peer, ...] = ()
        self.store: Store | None = None
        """The ranks as processes, by rank, and the store in which they met; empty and None where they are threads."""
        self.attempt = 0  # number of earlier starts of these ranks, the same on all of them
        self.stop_signal = 0  # the number of a signal that asks this rank to end; the ranks agree on it at a step's end
        self._groups: dict[tuple[str, ...], Group] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.size

    @property
    def local_rank(self) -> int:
        """The number of this rank on its machine."""
        return int(os.environ.get("LOCAL_RANK") or self.rank)

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this rank's machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or self.mesh.size)

    @property
    def overlaps(self) -> bool:
        """True if messages travel during computation: on GPUs, and where there are more cores than ranks use."""
        cores = os.cpu_count() or 1
        return self.device.type == "cuda" or cores > self.local_world_size * torch.get_num_threads()

    # ---- what may be asked ------------------------------------------------------------------------------

    def all_gather(self, out: Tensor, piece: Tensor, axes: Sequence[str], note: Note = NO_NOTE) -> Work:
        """Gathers every member's ``piece``, end to end in group order, into every member's ``out``; nothing is copied
        where ``piece`` is the very slice of ``out`` at this rank's index."""
        return self._cut("all_gather", out, piece, axes, note).start()

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, axes: Sequence[str], op: str = "sum", note: Note = NO_NOTE
    ) -> Work:
        """Reduces all members' ``whole`` and cuts the result in equal pieces; member k keeps piece k in ``out``, which
        may be the very slice of ``whole`` at this rank's index."""
        return self._cut("reduce_scatter", whole, out, axes, note, op).start()

    def all_reduce(self, tensor: Tensor, axes: Sequence[str], op: str = "sum", note: Note = NO_NOTE) -> Work:
        """Reduces all members' ``tensor`` in place on every member."""
        return self._one("all_reduce", tensor, axes, note, op).start()

    def broadcast(self, tensor: Tensor, axes: Sequence[str], src: int, note: Note = NO_NOTE) -> Work:
        """Copies the ``tensor`` of the group's member ``src`` (an index within the group) to every member."""
        return self._one("broadcast", tensor, axes, note, None, src).start()

    def reduce(self, tensor: Tensor, axes: Sequence[str], dst: int, op: str = "sum", note: Note = NO_NOTE) -> Work:
        """Reduces all members' ``tensor``, in place on member ``dst``; the others' tensors stay as they are."""
        return self._one("reduce", tensor, axes, note, op, dst).start()

    def scatter(self, out: Tensor, whole: Tensor | None, axes: Sequence[str], src: int, note: Note = NO_NOTE) -> Work:
        """Copies piece k of member ``src``'s ``whole`` into member k's ``out``; ``whole`` is None off the root."""
        return self._cut("scatter", whole, out, axes, note, None, src).start()

    def gather(self, out: Tensor | None, piece: Tensor, axes: Sequence[str], dst: int, note: Note = NO_NOTE) -> Work:
        """Gathers every member's ``piece``, end to end, into ``out`` of member ``dst``; ``out`` is None elsewhere."""
        return self._cut("gather", out, piece, axes, note, None, dst).start()

    def all_to_all(self, out: Tensor, whole: Tensor, axes: Sequence[str], note: Note = NO_NOTE) -> Work:
        """Sends piece k of ``whole`` to member k, and receives piece k of ``out`` from member k."""
        group = self._group(axes)
        n = len(group.ranks)
        out, whole = flat(out, "out", "all_to_all", self.device), flat(whole, "whole", "all_to_all", self.device)
        same_kind("all_to_all", out, whole)
        if out.numel() != whole.numel() or whole.numel() % n:
            raise ValueError(
                f"all_to_all over {names(group)}: whole has {whole.numel()} elements and out {out.numel()}; "
                f"they must be equal and a multiple of {n}, so pad the pieces to one size"
            )
        if n == 1:
            return copied(out, whole)
        if overlap(out, whole):
            raise ValueError("all_to_all cannot overwrite data that it has yet to send: give it another out")
        return self._ask("all_to_all", group, note, whole.numel(), whole.dtype, (out, whole)).start()

    def prepare(
        self,
        kind: str,
        whole: Tensor,
        piece: Tensor | None,
        axes: Sequence[str],
        note: Note = NO_NOTE,
        root: int | None = None,
    ) -> Prepared | Alone:
        """Prepares one of these operations for repeated use: checked now, on these tensors, whose memory may move.

        Args:
            kind: all_gather, reduce_scatter (a sum), all_reduce (a sum), broadcast or reduce (a sum).
            piece: for the first two.
            root: for the last two, an index within the group.
        """
        op = None if kind in ("all_gather", "broadcast") else "sum"
        if piece is None:
            return self._one(kind, whole, axes, note, op, root)
        return self._cut(kind, whole, piece, axes, note, op)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of 1 dim in memory that is best for gathers and reductions in place."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def common(self, numel: int, dtype: torch.dtype, axes: Sequence[str]) -> Tensor | None:
        """Returns memory, all zeros, that a group's ranks share in one copy; None if this world has no such memory.

        All of them see a rank's writes once it has announced them (``wrote_common``) and an ``all_gather`` or a
        ``broadcast`` into the memory was waited for: these move nothing then, but are written into the ledger.  All
        members must call it, with the same arguments.
        """
        group = self._group(axes)
        return None if len(group.ranks) == 1 or not numel else self._common(group, numel, dtype)

    def wait_for_readers(self) -> None:
        """Waits until all ranks that share common memory with this one have called it too, so that none reads any.  It
        must precede a write, unless a collective among them followed the last read."""
        return None

    def wrote_common(self, *, later: bool = False) -> None:
        """Announces that this rank wrote to common memory; all ranks do so equally often, and gathers wait for it.

        ``later``: the next gather announces it, as it does for writes after ``wait_for_readers``."""
        return None

    def send(self, tensor: Tensor, dst: int, note: Note = NO_NOTE) -> Work:
        """Sends ``tensor`` to the (global) rank ``dst``.  Its handle may be dropped: the message is still sent."""
        return self._message("send", tensor, dst, note)

    def recv(self, tensor: Tensor, src: int, note: Note = NO_NOTE) -> Work:
        """Receives the next message of the (global) rank ``src`` into ``tensor``, complete after ``wait()``.

        A message of another shape or dtype is a MismatchError among threads.  Between processes it never arrives, and
        the deadline's error names the operation.  If only the sender knows them, send a header first (``header.py``).
        """
        return self._message("recv", tensor, src, note)

    def barrier(self, axes: Sequence[str], note: Note = NO_NOTE) -> None:
        """Returns when every member has called it."""
        group = self._group(axes)
        if len(group.ranks) > 1:
            self._ask("barrier", group, note, 0, torch.uint8, ()).start()

    def close(self) -> None:
        """Frees the resources of the world, and notifies the observers.  No operation may follow."""
        self.end_observers()

    def end_observers(self) -> None:
        """Notifies the observers that nothing more will come."""
        for observer in self.observers:
            observer.closed()

    def waiting(self, operation: Operation) -> AbstractContextManager[None]:
        """Surrounds every place where this rank may wait for others; notifies the observers."""
        return Waiting(self.observers, operation) if self.observers else NOBODY

    def begin_step(self, number: int) -> None:
        """Notifies the observers that step ``number`` (from 0) begins."""
        for observer in self.observers:
            observer.begin_step(number)

    # ---- what a world supplies -----------------------------------------------------------------
    # Each takes the operation, then tensors (1-D, except in messages); the group has at least two members.

    _all_gather: Callable[..., Work]  # out, piece
    _reduce_scatter: Callable[..., Work]  # out, whole
    _all_reduce: Callable[..., Work]  # tensor
    _broadcast: Callable[..., Work]  # tensor
    _reduce: Callable[..., Work]  # tensor
    _scatter: Callable[..., Work]  # out, whole or None
    _gather: Callable[..., Work]  # out or None, piece
    _all_to_all: Callable[..., Work]  # out, whole
    _send: Callable[..., Work]  # tensor, dst
    _recv: Callable[..., Work]  # tensor, src
    _barrier: Callable[..., Work | None]
    # For checks: a small message ahead of an operation, in order with others of its kind, and separate from the rest.
    _tell: Callable[..., Work]  # row, dst
    _hear: Callable[..., None]  # row, src; waits for it

    def _common(self, group: Group, numel: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def _abandon(self, why: str) -> None:
        """Stops this rank's part in the world; ``why`` is reported to the ranks that wait for it."""
        return None

    # ---- checking, recording, asking -----------------------------------------------------------

    def _number(self, *key: object) -> int:
        """Counts the calls with this key: operations are matched by their numbers."""
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        return number

    def _group(self, axes: Sequence[str]) -> Group:
        axes = tuple(axes)
        if axes not in self._groups:
            self._groups[axes] = group_of(self.mesh, self.rank, axes)
        return self._groups[axes]

    def _ask(
        self,
        kind: str,
        group: Group,
        note: Note,
        numel: int,
        dtype: torch.dtype,
        what: Sequence[Tensor | int | None],
        op: str | None = None,
        root: int | None = None,
    ) -> Prepared:
        """Returns an operation that may begin, with the world's own method."""
        size = numel * dtype.itemsize
        sent = bytes_sent(kind, size, len(group.ranks), root=root == group.index)
        operation = Operation(kind, group, note, numel, dtype, op or "", -1 if root is None else root)
        return Prepared(self, Entry(kind, group.axes, size, sent, note), operation, what, getattr(self, f"_{kind}"))

    def begin(self, prepared: Prepared) -> Work:
        """Writes the line of an operation into the ledger, notifies the observers, and leaves the rest to the world."""
        operation, what = prepared.operation, prepared.what
        self.ledger.add(prepared.entry)
        for observer in self.observers:
            observer.asked(operation)
        return prepared.method(operation, *what)

    def _cut(
        self,
        kind: str,
        whole: Tensor | None,
        piece: Tensor,
        axes: Sequence[str],
        note: Note,
        op: str | None = None,
        root: int | None = None,
    ) -> Prepared | Alone:
        """Prepares gathers and scatters: equal pieces on all members; only the root, if there is one, has the whole."""
        group, gathers = self._group(axes), kind in ("all_gather", "gather")
        check_meaning(kind, group, op, root)
        whole_name, piece_name = ("out", "piece") if gathers else ("whole", "out")
        n, piece = len(group.ranks), flat(piece, piece_name, kind, self.device)
        if root in (None, group.index):
            if whole is None:
                raise ValueError(f"{kind}: rank {self.rank} is the root and needs {whole_name}, not None")
            whole = flat(whole, whole_name, kind, self.device)
            check_pieces(kind, group, whole, whole_name, piece, piece_name)
        elif whole is not None:
            root_is = f"that is rank {group.ranks[root or 0]}"
            raise ValueError(f"{kind}: rank {self.rank} is not the root ({root_is}): {whole_name} is None here")
        out, source = (whole, piece) if gathers else (piece, whole)
        if n == 1 and out is not None and source is not None:
            return Alone(partial(copied, out, source))
        return self._ask(kind, group, note, n * piece.numel(), piece.dtype, (out, source), op, root)

    def _one(
        self, kind: str, tensor: Tensor, axes: Sequence[str], note: Note, op: str | None, root: int | None = None
    ) -> Prepared | Alone:
        """Prepares all_reduce, broadcast and reduce: one tensor, in place."""
        group, tensor = self._group(axes), flat(tensor, "tensor", kind, self.device)
        check_meaning(kind, group, op, root)
        if len(group.ranks) == 1:
            return Alone()
        return self._ask(kind, group, note, tensor.numel(), tensor.dtype, (tensor,), op, root)

    def _message(self, kind: str, tensor: Tensor, peer: int, note: Note) -> Work:
        """Starts send and recv."""
        values = flat(tensor, "tensor", kind, self.device).view(tensor.shape)
        group = pair_of(self.mesh, self.rank, kind, peer)
        return self._ask(kind, group, note, tensor.numel(), tensor.dtype, (values, peer)).start()
