"""Single messages between processes over gloo: started, waited for and failed here.

    send(x, dst, tag) ──► [(torch's handle, the memory it works on), ...]     long tensors go in chunks
    wait(works)       ──► all within one deadline, or an error with the operation and every member

Messages with different tags never meet.  ``nccl.py`` adds what GPUs need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.operation import Operation
from plait.comm.ordered_reduce import ordered_sum
from plait.comm.transport import Started, Transport

if TYPE_CHECKING:
    from plait.comm.base import Comm

CHUNK_BYTES = 8 * 2**20
"""Longer messages are sent in chunks of this many bytes (256 MB: 5 to 15 % faster than in one piece)."""


class GlooTransport(Transport):
    """Messages over sockets."""

    over_sockets = True

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise ValueError(
                "messages over sockets need torch's default process group: init_process_group('gloo') first"
            )
        self._group = group
        self._spare: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def send(self, operation: Operation, tensor: Tensor, dst: int, tag: int) -> list[Started]:
        return self._start(operation, tensor, lambda chunk: self._group.send([chunk], dst, tag))

    def recv(self, operation: Operation, tensor: Tensor, src: int, tag: int) -> list[Started]:
        return self._start(operation, tensor, lambda chunk: self._group.recv([chunk], src, tag))

    def exchange(
        self, operation: Operation, slots: Sequence[Tensor], slices: Sequence[Tensor], tag: int
    ) -> list[Started]:
        ranks, index = operation.group.ranks, operation.group.index
        works: list[Started] = []
        for step in range(1, len(ranks)):  # each at its own distance, so that members begin with different ones
            behind, ahead = index - step, (index + step) % len(ranks)
            works += self.recv(operation, slots[behind], ranks[behind], tag)
            works += self.send(operation, slices[ahead], ranks[ahead], tag)
        return works

    def reduce(
        self, operation: Operation, mine: Tensor, slices: Sequence[Tensor], out: Tensor, tag: int
    ) -> tuple[list[Started], Callable[[], None] | None]:
        buffer, stack = self._receive_stack(operation, mine)

        def finish() -> None:
            ordered_sum(stack, operation.group.sizes, operation.op, out)
            self._spare[buffer.dtype, buffer.device].append(buffer)

        return self.exchange(operation, stack, slices, tag), finish

    def wait(self, operation: Operation, works: Sequence[Started]) -> None:
        end = time.monotonic() + self.deadline
        with self._waiting(operation):
            try:
                for work, _ in works:
                    work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError as error:
                raise self.failure(operation, error) from error

    def _start(self, operation: Operation, tensor: Tensor, start: Callable[[Tensor], Any]) -> list[Started]:
        self._check(operation)
        if not tensor.numel():
            return []
        flat, most = tensor.view(-1), CHUNK_BYTES // tensor.element_size()
        chunks = (flat,) if len(flat) <= most else torch.split(flat, most)
        try:
            return [(start(chunk), chunk) for chunk in chunks]
        except RuntimeError as error:  # a peer is known to be gone: this rank reports it as in ``wait``
            with self._waiting(operation):
                raise self.failure(operation, error) from error

    def _receive_stack(self, operation: Operation, mine: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns a receive buffer, and one tensor per member: a part of the buffer, or ``mine``.  Fresh memory costs
        more than the message, so buffers are used again."""
        n, m = len(operation.group.ranks), mine.numel()
        spare = self._spare.setdefault((mine.dtype, mine.device), [])
        spare.sort(key=torch.Tensor.numel)
        fits = next((i for i, buffer in enumerate(spare) if buffer.numel() >= (n - 1) * m), None)
        if fits is not None:
            buffer = spare.pop(fits)
        else:
            del spare[-1:]  # a longer one replaces a shorter one
            buffer = mine.new_empty((n - 1) * m)
        stack = [buffer[k * m : (k + 1) * m] for k in range(n - 1)]
        stack.insert(operation.group.index, mine)
        return buffer, stack
