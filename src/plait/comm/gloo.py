"""Single messages between processes over gloo: started here, waited for here, and failing here.

    send(x, dst, tag) ──► [(torch's handle, the memory it works on), ...]     long tensors go in chunks
    wait(works)       ──► all within one deadline, or an error that names the operation and every member

Messages with different tags never meet.  After its first failure a transport starts nothing more, because sockets
promise nothing about what is still under way.  ``nccl.py`` adds what GPUs need.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.failures import FailureReports
from plait.comm.operation import Operation

CHUNK_BYTES = 8 * 2**20
"""Longer messages are sent in chunks of this size (256 MB: 5 to 15 % faster than in one piece)."""

Started = tuple[Any, Tensor]
"""A handle of torch and the memory it works on, which must live as long."""


class GlooTransport:
    """Messages of one process; ``waiting`` is entered around every wait (``Comm.waiting``)."""

    def __init__(
        self,
        rank: int,
        deadline: float,
        reports: FailureReports,
        waiting: Callable[[Operation], AbstractContextManager[None]],
    ) -> None:
        group = dist.group.WORLD
        assert group is not None, "the default process group is made first"
        self._group, self.rank, self.deadline = group, rank, deadline
        self._reports, self._waiting = reports, waiting
        self.broken = ""  # or why nothing can be started any more

    def send(self, operation: Operation, tensor: Tensor, dst: int, tag: int) -> list[Started]:
        return self._start(operation, tensor, lambda chunk: self._group.send([chunk], dst, tag))

    def recv(self, operation: Operation, tensor: Tensor, src: int, tag: int) -> list[Started]:
        return self._start(operation, tensor, lambda chunk: self._group.recv([chunk], src, tag))

    def exchange(
        self, operation: Operation, slots: Sequence[Tensor], slices: Sequence[Tensor], tag: int
    ) -> list[Started]:
        """Slice k to member k, slot k from member k, all at once; nothing for this rank itself."""
        ranks, index = operation.group.ranks, operation.group.index
        works: list[Started] = []
        for step in range(1, len(ranks)):  # each at its own distance, so that no member is everybody's first
            behind, ahead = index - step, (index + step) % len(ranks)
            works += self.recv(operation, slots[behind], ranks[behind], tag)
            works += self.send(operation, slices[ahead], ranks[ahead], tag)
        return works

    def library(self, operation: Operation, out: Tensor, source: Tensor) -> list[Started]:
        """The collective as the library makes it; nothing where it is better made of messages."""
        return []

    def wait(self, operation: Operation, works: Sequence[Started]) -> None:
        """Waits for what was started; raises TimeoutError after the deadline, ConnectionError where a connection broke,
        with the others' reports."""
        end = time.monotonic() + self.deadline
        with self._waiting(operation):
            try:
                for work, _ in works:
                    work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError as error:
                raise self._failure(operation, error) from error

    def give_up(self, why: str) -> None:
        """Starts nothing more; whoever waits for this rank, or loses it, reads why."""
        self.broken = why
        self._reports.post(why)

    def _start(self, operation: Operation, tensor: Tensor, start: Callable[[Tensor], Any]) -> list[Started]:
        if self.broken:
            raise ConnectionError(f"rank {self.rank} in {operation}: {self.broken}")
        if not tensor.numel():
            return []
        flat, most = tensor.view(-1), CHUNK_BYTES // tensor.element_size()
        chunks = (flat,) if len(flat) <= most else torch.split(flat, most)
        try:
            return [(start(chunk), chunk) for chunk in chunks]
        except RuntimeError as error:
            raise self._failure(operation, error) from error

    def _failure(self, operation: Operation, error: BaseException) -> OSError:
        if self.broken:
            return ConnectionError(f"rank {self.rank} in {operation}: {self.broken}")
        self.broken = f"this world broke down earlier, in {operation}"
        others = [r for r in operation.group.ranks if r != self.rank]
        return self._reports.error(str(operation), error, self.deadline, others)
