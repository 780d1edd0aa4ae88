"""Ranks as threads of one process, for tests, notebooks and lessons: milliseconds per world.

A collective is a rendezvous (``rendezvous.py``).  The members provide their tensors, each does its own share straight
from the others' memory, and none leaves before all are done, because a tensor that is still read must not change:

    rank 0   arrive(whole0) ---+            add chunk 0 of whole0, whole1 -> out0 ---+            leave
                               |  all here                                           |  all done
    rank 1   arrive(whole1) ---+            add chunk 1 of whole0, whole1 -> out1 ---+            leave

The n-th barrier of some ranks is their n-th request; if two ranks differ in its meaning, both get an error.  Messages
are numbered as well: ``send`` copies and never blocks; ``wait()`` of the n-th ``recv`` waits for the n-th message.

    results = run(Mesh(shard=2), lambda comm: work(comm))      # one result per rank, or the first error
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from plait.comm.base import DONE, Comm, MismatchError, Operation, Work
from plait.comm.operation import copied, label
from plait.comm.ordered_reduce import ordered_sum
from plait.comm.rendezvous import AbortedError, Address, Rendezvous
from plait.messages.ended import to_its_end
from plait.table.mesh import Mesh

__all__ = ["AbortedError", "ThreadComm", "ThreadWorld", "run"]

Result = TypeVar("Result")

STOPPING = 10.0
"""Seconds that an interrupted run waits for its threads to reach their next operation."""


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

    @contextmanager
    def _meet(self, operation: Operation, mine: Tensor) -> Iterator[list[Tensor]]:
        """Yields the tensors of the members, in group order."""
        number = self._number(tuple(sorted(operation.group.ranks)))
        with self.waiting(operation), self.world.meet(number, operation, mine) as brought:
            yield brought

    def _gather(self, operation: Operation, out: Tensor | None, piece: Tensor) -> Work:
        with self._meet(operation, piece) as pieces:
            for slot, theirs in zip(out.tensor_split(len(pieces)), pieces, strict=True) if out is not None else ():
                copied(slot, theirs)
        return DONE

    _all_gather = _gather

    def _reduce_scatter(self, operation: Operation, out: Tensor, whole: Tensor) -> Work:
        index = operation.group.index
        with self._meet(operation, whole) as wholes:
            ordered_sum([w.tensor_split(len(wholes))[index] for w in wholes], operation.group.sizes, operation.op, out)
        return DONE

    def _all_reduce(self, operation: Operation, tensor: Tensor) -> Work:
        # Member k adds up chunk k and writes it into every member's tensor; no one else touches chunk k.
        index, n = operation.group.index, len(operation.group.ranks)
        chunk = -(-tensor.numel() // n)
        with self._meet(operation, tensor) as tensors:
            chunks = [t[index * chunk : (index + 1) * chunk] for t in tensors]
            ordered_sum(chunks, operation.group.sizes, operation.op, chunks[index])
            for k in range(n):
                if k != index:
                    chunks[k].copy_(chunks[index])
        return DONE

    def _broadcast(self, operation: Operation, tensor: Tensor) -> Work:
        with self._meet(operation, tensor) as tensors:
            if operation.group.index != operation.root:
                tensor.copy_(tensors[operation.root])
        return DONE

    def _reduce(self, operation: Operation, tensor: Tensor) -> Work:
        with self._meet(operation, tensor) as tensors:
            if operation.group.index == operation.root:
                ordered_sum(tensors, operation.group.sizes, operation.op, tensor)
        return DONE

    def _scatter(self, operation: Operation, out: Tensor, whole: Tensor | None) -> Work:
        with self._meet(operation, out if whole is None else whole) as brought:
            copied(out, brought[operation.root].tensor_split(len(brought))[operation.group.index])
        return DONE

    def _all_to_all(self, operation: Operation, out: Tensor, whole: Tensor) -> Work:
        with self._meet(operation, whole) as wholes:
            for slot, theirs in zip(out.tensor_split(len(wholes)), wholes, strict=True):
                slot.copy_(theirs.tensor_split(len(wholes))[operation.group.index])
        return DONE

    def _send(self, operation: Operation, tensor: Tensor, dst: int) -> Work:
        self.world.post(operation, tensor, self._address("message", self.rank, dst))
        return DONE

    def _recv(self, operation: Operation, tensor: Tensor, src: int) -> Work:
        return _Receive(self, operation, tensor, self._address("message", src, self.rank))

    def _barrier(self, operation: Operation) -> None:
        with self._meet(operation, torch.empty(0)):
            pass

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
        with torch.no_grad():
            tensor.copy_(message)


def _join(threads: list[threading.Thread], seconds: float) -> None:
    """Waits until the threads are gone, but at most for so many seconds.

    Python's join returns when a thread has left Python.  torch's objects in it (the nodes of a backward that raised)
    are destroyed later and may need the interpreter; if that ends first, the process dies with "terminate called
    without an active exception".  Linux knows which threads exist.
    """
    give_up = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
        task = Path(f"/proc/self/task/{thread.native_id}")
        while not thread.is_alive() and task.exists() and time.monotonic() < give_up:
            time.sleep(0.0005)


def settle_vector_math() -> None:
    """Calls, in one thread, functions that torch's libraries set up on their first call: threads that made a process's
    first calls of ``cos`` or ``exp`` at the same time were seen to get values that were off by 1e-9."""
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(0.1, 0.9, 64, dtype=dtype)
        for function in (torch.cos, torch.sin, torch.tan, torch.exp, torch.log, torch.tanh, torch.erf, torch.sqrt):
            function(x)
        x.pow(1.5)


def run(
    mesh: Mesh,
    fn: Callable[[Comm], Result],
    *,
    deadline: float = 30.0,
    deterministic: bool = True,
    device: torch.device | str = "cpu",
) -> list[Result]:
    """Runs ``fn(comm)`` on one thread per rank and returns the results in rank order.

    When a rank raises, the others stop at their next operation, and the *first* failure is raised here.
    """
    world = ThreadWorld(mesh, deadline, deterministic, device)
    settle_vector_math()
    results: dict[int, Result] = {}
    failures: list[tuple[int, BaseException]] = []  # in the order of occurrence

    def rank_main(rank: int) -> None:
        world.begin(rank)
        torch.get_num_threads()  # sets MKL in this thread; otherwise products change their bits when torch does
        torch.set_autocast_cache_enabled(False)  # all threads share its casts, and the first one to leave drops them
        try:
            # torch has one thread for the backwards of a GPU, in which a rank would wait for one that comes later
            with to_its_end(), torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(world.comm(rank))
        except BaseException as error:
            failures.append((rank, error))
            world.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            world.end(rank)

    ranks = range(mesh.size)
    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and not failures:
                thread.join(0.05)
        # After a failure the others end at their next operation; one that never reaches it is abandoned.
        _join(threads, deadline)
    except BaseException:
        world.abort("the calling thread was interrupted")
        _join(threads, min(deadline, STOPPING))  # a thread that computes while the interpreter ends would crash it
        raise
    if failures:
        rank, error = next((f for f in failures if not isinstance(f[1], AbortedError)), failures[0])
        error.add_note(f"(raised on rank {rank} of {mesh.size}, mesh {mesh})")
        raise error
    return [results[rank] for rank in ranks]
