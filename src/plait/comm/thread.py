"""Ranks as threads of one process, for tests, notebooks and lessons: milliseconds per world.

A collective is a rendezvous (``rendezvous.py``).  The members bring their tensors, and the last one to come moves them
for all, straight from memory to memory:

    rank 0   brings out0, whole0 ----- waits -------------------------------------------+   goes on
                                                                                        |
    rank 1   brings out1, whole1, the last: out0 = chunk 0 of whole0 + whole1, out1 ... +   goes on

The n-th requests of a group's ranks meet; if two of them differ in meaning, their ranks get an error.  Messages are
numbered as well: ``send`` copies and never blocks; ``wait()`` of the n-th ``recv`` waits for the n-th message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm.base import DONE, Comm, MismatchError, Operation, Work
from plait.comm.checks import label
from plait.comm.operation import copied
from plait.comm.ordered_reduce import ordered_sum
from plait.comm.rendezvous import Address, Rendezvous
from plait.table.mesh import Mesh

# ---- what the last member of a collective does for all: the tensors that each brought, in group order ----------------


def gather(operation: Operation, members: Sequence[Any]) -> None:
    for out, _ in members:
        for slot, (_, piece) in zip(out.tensor_split(len(members)), members, strict=True) if out is not None else ():
            copied(slot, piece)


def reduce_scatter(operation: Operation, members: Sequence[Any]) -> None:
    cut = [whole.tensor_split(len(members)) for _, whole in members]
    for (out, _), pieces in zip(members, zip(*cut, strict=True), strict=True):
        ordered_sum(pieces, operation.group.sizes, operation.op, out)


def all_reduce(operation: Operation, members: Sequence[Any]) -> None:
    (first,), *others = members
    ordered_sum([tensor for (tensor,) in members], operation.group.sizes, operation.op, first)
    for (tensor,) in others:
        tensor.copy_(first)


def broadcast(operation: Operation, members: Sequence[Any]) -> None:
    (source,) = members[operation.root]
    for (tensor,) in members:
        copied(tensor, source)


def reduce(operation: Operation, members: Sequence[Any]) -> None:
    tensors = [tensor for (tensor,) in members]
    ordered_sum(tensors, operation.group.sizes, operation.op, tensors[operation.root])


def scatter(operation: Operation, members: Sequence[Any]) -> None:
    _, whole = members[operation.root]
    for (out, _), piece in zip(members, whole.tensor_split(len(members)), strict=True):
        copied(out, piece)


def all_to_all(operation: Operation, members: Sequence[Any]) -> None:
    for index, (out, _) in enumerate(members):
        for slot, (_, whole) in zip(out.tensor_split(len(members)), members, strict=True):
            slot.copy_(whole.tensor_split(len(members))[index])


MOVES: dict[str, Callable[[Operation, Sequence[Any]], None]] = {
    **{"all_gather": gather, "gather": gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce},
    **{"broadcast": broadcast, "reduce": reduce, "scatter": scatter, "all_to_all": all_to_all},
    "barrier": lambda operation, members: None,
}


class ThreadWorld(Rendezvous):
    """The meeting place for the ranks of one mesh, with their settings."""

    def __init__(
        self, mesh: Mesh, deadline: float = 30.0, deterministic: bool = True, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(mesh.size, deadline)
        self.mesh, self.deterministic, self.device = mesh, deterministic, torch.device(device)

    def comm(self, rank: int) -> ThreadComm:
        return ThreadComm(self, rank)


class ThreadComm(Comm):
    """One thread's access to a ThreadWorld.  Every collective is complete when its call returns."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(
            world.mesh, rank, device=world.device, deadline=world.deadline, deterministic=world.deterministic
        )
        self.world = world

    def _meet(self, operation: Operation, *mine: Tensor | None) -> Work:
        number = self._number(tuple(sorted(operation.group.ranks)))
        with self.waiting(operation):
            self.world.meet(number, operation, mine, MOVES[operation.kind])
        return DONE

    _all_gather = _gather = _reduce_scatter = _all_reduce = _broadcast = _reduce = _scatter = _all_to_all = _meet
    _barrier = _meet

    def _send(self, operation: Operation, tensor: Tensor, dst: int) -> Work:
        self.world.post(operation, tensor, self._address("message", self.rank, dst))
        return DONE

    def _recv(self, operation: Operation, tensor: Tensor, src: int) -> Work:
        return _Receive(self, operation, tensor, self._address("message", src, self.rank))

    def _tell(self, operation: Operation, row: Tensor, dst: int) -> Work:
        self.world.post(operation, row, self._address("description", self.rank, dst))
        return DONE

    def _hear(self, operation: Operation, row: Tensor, src: int) -> None:
        with self.waiting(operation):
            row.copy_(self.world.take(operation, self._address("description", src, self.rank)))

    def _address(self, what: str, src: int, dst: int) -> Address:
        """The address of the next message between two ranks."""
        return src, dst, what, self._number(what, src, dst)


class _Receive:
    def __init__(self, comm: ThreadComm, operation: Operation, tensor: Tensor, address: Address) -> None:
        self._comm, self._operation, self._address = comm, operation, address
        self._tensor: Tensor | None = tensor

    def wait(self) -> None:
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            return
        with self._comm.waiting(self._operation):
            message = self._comm.world.take(self._operation, self._address)
        if label(message) != label(tensor):
            src, dst = self._operation.group.ranks
            raise MismatchError(
                f"rank {dst} receives {label(tensor)} from rank {src}, which sent {label(message)}: make both equal "
                f"({self._operation})"
            )
        tensor.copy_(message)
