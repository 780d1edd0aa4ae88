"""GPUs: the process world over nccl, where ``deterministic`` folds by hand and the rest is the library's.

UNTESTED: nothing here has run on a GPU yet.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import permutations
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.base import Call, Incoming, Work
from plait.comm.messages import HEADER_BYTES, Headed, Pending, Started, checksum, label, read_label
from plait.comm.process import ProcessComm
from plait.core.mesh import AXES, Mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Names that differ between releases of torch, chosen here and nowhere else.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_UNSORTED: Any = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


class NcclComm(ProcessComm):
    """GPUs.  Headers and barriers stay on gloo; tensors go by nccl.  UNTESTED.

    Groups are made here, eagerly and in the same order on every rank: for every set of axes larger than
    1 in every order (a group's order is the order of its pieces).  Messages between neighbours of a pipeline
    (the last and the first are neighbours too) have a communicator for each direction, so that a receive posted early
    stands in nobody's way; all others share two lanes, to higher and to lower ranks.
    """

    def __init__(self, mesh: Mesh, rank: int, store: Store, **options: Any) -> None:
        super().__init__(mesh, rank, store, **options)
        torch.cuda.set_device(self.device)
        make: dict[str, Any] = {"backend": "nccl", "timeout": timedelta(seconds=self.deadline)}
        everyone = list(range(mesh.size))
        self._lanes = {up: dist.new_group(everyone, **make) for up in (True, False)}
        self._channels: dict[tuple[int, int], Any] = {}
        for column in mesh.groups(("pipe",)) if mesh.pipe > 1 else ():
            ring = [(column[i - 1], one) for i, one in enumerate(column)]
            for a, b in dict.fromkeys((*ring, *((b, a) for a, b in ring))):
                self._channels[a, b] = dist.new_group([a, b], **make)
        for (a, b), group in self._channels.items():  # a communicator is made at its first use, by both
            if rank in (a, b):
                one = torch.zeros(1, device=self.device)
                work = dist.isend(one, b, group=group) if rank == a else dist.irecv(one, a, group=group)
                assert work is not None
                work.wait()
        self._queues: dict[int, deque[InTurn]] = {}
        large = [a for a in AXES if mesh.axis(a) > 1]
        self._nccl: dict[tuple[str, ...], Any] = {}
        for axes in (p for k in range(1, len(large) + 1) for p in permutations(large, k)):
            for ranks in mesh.groups(axes):
                group = dist.new_group(list(ranks), **make, **_UNSORTED)
                if rank in ranks:
                    self._nccl[axes] = group

    def _library(self, call: Call) -> tuple[Any, list[int]]:
        """torch's group, and the order in which it has our members (sorted, where it cannot keep ours)."""
        group = self._nccl[tuple(a for a in call.group.axes if self.mesh.axis(a) > 1)]
        n, ranks = len(call.group.ranks), call.group.ranks
        return group, list(range(n)) if _UNSORTED else sorted(range(n), key=lambda k: ranks[k])

    def exchange(self, call: Call, tag: int, slots: Sequence[Tensor], slices: Sequence[Tensor]) -> list[Started]:
        if slots[0].device.type != "cuda":
            return super().exchange(call, tag, slots, slices)
        group, order = self._library(call)
        nothing, index = slots[0].new_empty(0), call.group.index
        into = [slots[k] if k != index else nothing for k in order]
        from_ = [slices[k] if k != index else nothing for k in order]
        return [(dist.all_to_all(into, from_, group=group, async_op=True), slots[0])]

    def _all_gather(self, call: Call, out: Tensor, piece: Tensor) -> Work:
        group, order = self._library(call)
        if order != sorted(order):
            return super()._all_gather(call, out, piece)
        return Pending(self, call, [(_all_gather_single(out, piece, group=group, async_op=True), out)])

    def _reduce_scatter(self, call: Call, out: Tensor, whole: Tensor) -> Work:
        group, order = self._library(call)
        if self.deterministic or order != sorted(order):
            return super()._reduce_scatter(call, out, whole)
        work = _reduce_scatter_single(out, whole, op=_library_op(call.op), group=group, async_op=True)
        return Pending(self, call, [(work, whole)])

    def _all_reduce(self, call: Call, tensor: Tensor) -> Work:
        if self.deterministic:
            return super()._all_reduce(call, tensor)
        group, _ = self._library(call)
        work = dist.all_reduce(tensor, op=_library_op(call.op), group=group, async_op=True)
        return Pending(self, call, [(work, tensor)])

    def _post(self, call: Call, tensor: Tensor, dst: int, tag: int) -> list[Started]:
        if tensor.device.type != "cuda":
            return super()._post(call, tensor, dst, tag)
        lane = self._channels.get((self.rank, dst)) or self._lanes[dst > self.rank]
        return self._start(call, tensor, lambda chunk: dist.isend(chunk, dst, group=lane))

    def _receive(self, call: Call, tensor: Tensor, src: int, tag: int) -> list[Started]:
        if tensor.device.type != "cuda":
            return super()._receive(call, tensor, src, tag)
        lane = self._channels.get((src, self.rank)) or self._lanes[self.rank > src]
        return self._start(call, tensor, lambda chunk: dist.irecv(chunk, src, group=lane))

    def _send(self, call: Call, tensor: Tensor, dst: int, agreed: bool) -> Work:
        return super()._send(call, tensor, dst, False)

    def _recv(self, call: Call, tensor: Tensor, src: int, agreed: bool) -> Work:
        return cast(Work, self._in_turn(call, src, tensor))

    def _recv_new(self, call: Call, src: int) -> Incoming:
        return self._in_turn(call, src, None)

    def _in_turn(self, call: Call, src: int, tensor: Tensor | None) -> InTurn:
        """nccl has no tags: messages of one sender are taken in in the order in which they were asked for."""
        number, header = self._number("message", src, self.rank), torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        first = self._receive(call, header, src, checksum("header", src, self.rank, number))
        message = InTurn(self, call, first, header, tensor, self._queues.setdefault(src, deque()))
        if tensor is not None and message.is_next:
            message.ask(self.end())
        return message

    def join_works(self, call: Call, works: Iterable[Started], end: float) -> None:
        """On the GPU a wait orders streams and does not stop this thread; nccl's watchdog has the deadline."""
        works = list(works)
        super().join_works(call, [(work, tensor) for work, tensor in works if tensor.device.type != "cuda"], end)
        for work, tensor in works:
            if tensor.device.type == "cuda" and work is not None:
                work.wait()


class InTurn(Headed):
    """A message of which only its place among those of its sender says which it is.

    It is asked of nccl when all before it have been; one whose shape only the header tells holds up those behind it,
    until somebody waits for one of them.
    """

    def __init__(
        self,
        comm: NcclComm,
        call: Call,
        first: list[Started],
        header: Tensor,
        tensor: Tensor | None,
        queue: deque[InTurn],
    ) -> None:
        super().__init__(comm, call, first, header)
        self._tensor, self._queue = tensor, queue
        self._meant = None if tensor is None else label(tensor)
        self._rest: list[Started] | None = None
        queue.append(self)

    @property
    def is_next(self) -> bool:
        return self._queue[0] is self

    def ask(self, end: float) -> None:
        """Have nccl take the message in; all before it have been asked for."""
        assert self.is_next
        if self._tensor is None:
            dtype, shape = read_label(self.read(end))
            self._tensor = torch.empty(shape, dtype=dtype, device=self._comm.device)
        self._rest = self._comm._receive(self._call, self._tensor, self._call.group.ranks[0], 0)
        self._queue.popleft()

    def wait(self) -> Tensor:  # type: ignore[override]
        """Asks for all before it, then for itself; checks the header; returns the message."""
        end = self._comm.end()
        while self._rest is None:
            self._queue[0].ask(end)
        assert self._tensor is not None
        if self.is_under_way:
            if self._meant is not None:
                self.check(self._meant, end)
            self.read(end)
            self._works = self._rest
            self.finish_by(end)
        return self._tensor


def _library_op(op: str) -> Any:
    return {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op]
