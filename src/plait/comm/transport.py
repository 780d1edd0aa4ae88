"""Moves the messages of a process: the part that all transports share.

    gloo.py, nccl.py           sockets and GPUs, over torch.distributed
    ``SHARED_MEMORY``, a wing  memory that the ranks of a host share; imported by the first world that asks for it

After its first failure a transport starts nothing more, because no promise holds for messages still under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.comm.failures import FailureReports
from plait.comm.operation import Operation

if TYPE_CHECKING:
    from plait.comm.base import Comm

SHARED_MEMORY = "plait.shared_memory.several_hosts"
"""The module whose ``transport(comm)`` makes the transport over shared memory."""

Started = tuple[Any, Tensor]
"""A handle and the memory it works on, which must outlive it."""


class Transport(ABC):
    """Messages of one process, for its ``comm``."""

    def __init__(self, comm: Comm) -> None:
        assert comm.store is not None
        self.rank, self.deadline, self._waiting = comm.rank, comm.deadline, comm.waiting
        self._reports = FailureReports(comm.store, comm.rank, comm.peers)
        self.broken = ""  # otherwise the reason why nothing more can be started

    progresses = True
    """True if messages travel while this rank computes."""
    over_sockets = False
    """True if messages go over torch's default process group."""

    @abstractmethod
    def send(self, operation: Operation, tensor: Tensor, dst: int, tag: int) -> list[Started]: ...

    @abstractmethod
    def recv(self, operation: Operation, tensor: Tensor, src: int, tag: int) -> list[Started]: ...

    @abstractmethod
    def exchange(
        self, operation: Operation, slots: Sequence[Tensor], slices: Sequence[Tensor], tag: int
    ) -> list[Started]:
        """Sends slice k to member k, and receives slot k from member k, all at once; nothing for this rank itself."""

    def reduce(
        self, operation: Operation, mine: Tensor, slices: Sequence[Tensor], out: Tensor, tag: int
    ) -> tuple[list[Started], Callable[[], None] | None]:
        """Sends slice k to member k, and receives from each member a slice like ``mine``, this rank's own; reduces them
        into ``out``, which may be ``mine``.  Returns the works, and the function to call once they were waited for.  A
        library that reduces has no need of it."""
        raise NotImplementedError

    @abstractmethod
    def wait(self, operation: Operation, works: Sequence[Started]) -> None:
        """Waits for started messages.  Raises TimeoutError after the deadline, ConnectionError if a connection broke,
        with the others' reports."""

    def library(self, operation: Operation, out: Tensor, source: Tensor) -> list[Started] | None:
        """Starts the library's own collective; None if messages are better."""
        return None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns memory from which tensors are sent without a copy; None if any memory will do."""
        return None

    def common(self, operation: Operation) -> Tensor | None:
        """Zeros in memory that the members share, as many as the operation has elements; None if there is none."""
        return None

    def wait_for_readers(self) -> None:
        """Returns when no rank reads common memory any more."""
        return None

    def wrote_common(self, *, later: bool) -> None:
        """Notes that this rank has written to common memory, or will have by its next gather."""
        return None

    def give_up(self, why: str) -> None:
        """Starts nothing more, and leaves ``why`` for the ranks that wait for this one."""
        self.broken = why
        self._reports.post(why)

    def close(self) -> None:
        """Frees its resources; messages that were sent still arrive."""
        self.broken = self.broken or "this world was closed"

    def _check(self, operation: Operation) -> None:
        """Refuses to start anything after a failure."""
        if self.broken:
            raise ConnectionError(f"rank {self.rank} in {operation}: {self.broken}")

    def failure(self, operation: Operation, error: BaseException) -> OSError:
        """Returns the error of a failed operation; from then on, nothing more is started."""
        if self.broken:
            return ConnectionError(f"rank {self.rank} in {operation}: {self.broken}")
        self.broken = f"this world broke down earlier, in {operation}"
        others = [r for r in operation.group.ranks if r != self.rank]
        return self._reports.error(str(operation), error, self.deadline, others)
