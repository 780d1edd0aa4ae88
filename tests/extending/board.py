"""A world from outside the package: ranks are threads that put their tensors on a board.

    put mine -> wait until all have -> copy what each put -> wait until all have copied

The guide shows it as an example of a new world.
"""

import threading
from queue import Queue

import torch
from torch import Tensor

from plait.comm import DONE, Comm, MismatchError, ordered_sum
from plait.table.mesh import Mesh


class Board:
    """Shared by the ranks: the tensors that each has put down, by group and member, and a queue per message."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.laid: dict[tuple[tuple[int, ...], int], Tensor | None] = {}
        self.barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self.letters: dict[tuple[int, int, int], Queue] = {}


class BoardComm(Comm):
    """One rank of it.  Every collective is complete when its call returns."""

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__(board.mesh, rank)
        self.board = board
        self.numbers: dict[tuple[int, int], int] = {}

    def exchange(self, operation, mine: Tensor | None) -> list:
        """The tensors of all members of the group, in its order, as copies."""
        members = operation.group.ranks
        barrier = self.board.barriers.setdefault(members, threading.Barrier(len(members)))
        self.board.laid[members, self.rank] = mine
        with self.waiting(operation):
            barrier.wait(self.deadline)  # all have laid down
            brought = [self.board.laid[members, rank] for rank in members]
            brought = [None if tensor is None else tensor.clone() for tensor in brought]
            barrier.wait(self.deadline)  # all have read
        return brought

    def piece(self, operation, whole: Tensor) -> Tensor:
        """This rank's equal piece."""
        size = whole.numel() // len(operation.group.ranks)
        return whole[operation.group.index * size :][:size]

    def _all_gather(self, operation, out, piece):
        out.copy_(torch.cat(self.exchange(operation, piece)))
        return DONE

    def _reduce_scatter(self, operation, out, whole):
        wholes = self.exchange(operation, whole)
        ordered_sum([self.piece(operation, w) for w in wholes], operation.group.sizes, operation.op, out)
        return DONE

    def _all_reduce(self, operation, tensor):
        ordered_sum(self.exchange(operation, tensor), operation.group.sizes, operation.op, tensor)
        return DONE

    def _broadcast(self, operation, tensor):
        tensor.copy_(self.exchange(operation, tensor)[operation.root])
        return DONE

    def _reduce(self, operation, tensor):
        brought = self.exchange(operation, tensor)
        if operation.group.index == operation.root:
            ordered_sum(brought, operation.group.sizes, operation.op, tensor)
        return DONE

    def _scatter(self, operation, out, whole):
        out.copy_(self.piece(operation, self.exchange(operation, whole)[operation.root]))
        return DONE

    def _gather(self, operation, out, piece):
        pieces = self.exchange(operation, piece)
        if out is not None:
            out.copy_(torch.cat(pieces))
        return DONE

    def _all_to_all(self, operation, out, whole):
        out.copy_(torch.cat([self.piece(operation, w) for w in self.exchange(operation, whole)]))
        return DONE

    def _barrier(self, operation):
        self.exchange(operation, None)

    def letter(self, src: int, dst: int) -> Queue:
        """Messages between two ranks are numbered; each has a queue of its own."""
        number = self.numbers[src, dst] = self.numbers.get((src, dst), -1) + 1
        return self.board.letters.setdefault((src, dst, number), Queue())

    def _send(self, operation, tensor, dst):
        self.letter(self.rank, dst).put(tensor.clone())
        return DONE

    def _recv(self, operation, tensor, src):
        return Receive(self, operation, tensor, self.letter(src, self.rank))


class Receive:
    """A message that was asked for; ``wait`` writes it into the tensor."""

    def __init__(self, comm: BoardComm, operation, tensor: Tensor, letter: Queue) -> None:
        self.comm, self.operation, self.tensor, self.letter = comm, operation, tensor, letter

    def wait(self) -> None:
        if self.letter is None:
            return
        with self.comm.waiting(self.operation):
            message, self.letter = self.letter.get(timeout=self.comm.deadline), None
        if (message.shape, message.dtype) != (self.tensor.shape, self.tensor.dtype):
            raise MismatchError(f"{self.operation}: asked for {shown(self.tensor)}, got {shown(message)}")
        self.tensor.copy_(message)


def shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
