"""GPUs: their tensors go by nccl, all others by gloo.

nccl's own collectives are used where they give our bits; where ``deterministic`` requires our order of additions,
``process.py`` builds the collective from messages, as on gloo.

UNTESTED: nothing here has run on a GPU yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.gloo import GlooTransport
from plait.comm.operation import Operation
from plait.comm.transport import Started
from plait.table.mesh import AXES, BORROWED

if TYPE_CHECKING:
    from plait.comm.base import Comm

# Names that differ between releases of torch, chosen here and nowhere else.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_UNSORTED: Any = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


class NcclTransport(GlooTransport):
    """Messages and collectives of one GPU.  UNTESTED.

    Groups are made at the start, in the same order on every rank: for every set of axes larger than 1 in every order,
    because a group's order is the order of its pieces.

    nccl has no tags and matches the messages of a communicator by their order.  Neighbours of a pipeline or a context
    group (the last and the first are neighbours too) have a communicator for each direction, so that a receive posted
    early blocks nothing; all others share two lanes, to higher and to lower ranks.
    """

    BACKEND = "nccl"

    @staticmethod
    def _takes(tensor: Tensor) -> bool:
        """True if a tensor goes by nccl."""
        return tensor.is_cuda

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        mesh, device, rank = comm.mesh, comm.device, comm.rank
        self._mesh, self._deterministic = mesh, comm.deterministic
        torch.cuda.set_device(device)
        make: dict[str, Any] = {"backend": self.BACKEND, "timeout": timedelta(seconds=self.deadline)}
        everyone = list(range(mesh.size))
        self._lanes = {up: dist.new_group(everyone, **make) for up in (True, False)}
        self._channels: dict[tuple[int, int], Any] = {}
        rings = [axes for axes in (("pipe",), ("context",)) if mesh.count(axes) > 1]
        for column in (group for axes in rings for group in mesh.groups(axes)):
            ring = [(column[i - 1], one) for i, one in enumerate(column)]
            for a, b in dict.fromkeys((*ring, *((b, a) for a, b in ring))):
                self._channels[a, b] = dist.new_group([a, b], **make)
        for (a, b), group in self._channels.items():  # both create a communicator at its first use
            if rank in (a, b):
                one = torch.zeros(1, device=device)
                work = dist.isend(one, b, group=group) if rank == a else dist.irecv(one, a, group=group)
                assert work is not None
                work.wait()
        large = [a for a in AXES if mesh.axis(a) > 1]
        self._groups: dict[tuple[str, ...], Any] = {}
        borrowed: list[tuple[str, ...]] = [(axis,) for axis in BORROWED if mesh.axis(axis) > 1]
        if mesh.expert > 1:  # a row's axes as experts see them, and the ranks of a cut
            data = [a for a in ("expert_shard", "replica") if mesh.axis(a) > 1]
            borrowed += [p for k in range(1, len(data) + 1) for p in permutations(data, k) if p != ("replica",)]
        borrowed += [(one, "tensor") for one in BORROWED if mesh.axis(one) > 1 and mesh.tensor > 1]
        for axes in (*borrowed, *(p for k in range(1, len(large) + 1) for p in permutations(large, k))):
            for ranks in mesh.groups(axes):
                group = dist.new_group(list(ranks), **make, **_UNSORTED)
                if rank in ranks:
                    self._groups[axes] = group

    def send(self, operation: Operation, tensor: Tensor, dst: int, tag: int) -> list[Started]:
        if not self._takes(tensor):
            return super().send(operation, tensor, dst, tag)
        lane = self._channels.get((self.rank, dst)) or self._lanes[dst > self.rank]
        return self._start(operation, tensor, lambda chunk: dist.isend(chunk, dst, group=lane))

    def recv(self, operation: Operation, tensor: Tensor, src: int, tag: int) -> list[Started]:
        if not self._takes(tensor):
            return super().recv(operation, tensor, src, tag)
        lane = self._channels.get((src, self.rank)) or self._lanes[self.rank > src]
        return self._start(operation, tensor, lambda chunk: dist.irecv(chunk, src, group=lane))

    def exchange(
        self, operation: Operation, slots: Sequence[Tensor], slices: Sequence[Tensor], tag: int
    ) -> list[Started]:
        if not self._takes(slots[0]):
            return super().exchange(operation, slots, slices, tag)
        group, order = self._group_of(operation)
        nothing, index = slots[0].new_empty(0), operation.group.index
        into = [slots[k] if k != index else nothing for k in order]
        from_ = [slices[k] if k != index else nothing for k in order]
        return [(dist.all_to_all(into, from_, group=group, async_op=True), slots[0])]

    def library(self, operation: Operation, out: Tensor, source: Tensor) -> list[Started] | None:
        if not self._takes(source):
            return None
        group, order = self._group_of(operation)
        kind, in_order = operation.kind, order == sorted(order)
        settings: dict[str, Any] = {"group": group, "async_op": True}
        if kind == "all_gather" and in_order:
            return [(_all_gather_single(out, source, **settings), out)]
        if self._deterministic or not operation.op:
            return None
        op = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[operation.op]
        if kind == "reduce_scatter" and in_order:
            return [(_reduce_scatter_single(out, source, op=op, **settings), source)]
        return [(dist.all_reduce(out, op=op, **settings), out)] if kind == "all_reduce" else None

    def wait(self, operation: Operation, works: Sequence[Started]) -> None:
        """On the GPU a wait orders streams and does not stop this thread; nccl's watchdog has the deadline."""
        super().wait(operation, [(work, tensor) for work, tensor in works if not self._takes(tensor)])
        for work, tensor in works:
            if self._takes(tensor):
                work.wait()

    def _group_of(self, operation: Operation) -> tuple[Any, list[int]]:
        """Returns torch's group, and its order of our members (sorted, if it cannot keep ours)."""
        axes = ("shard" if a == "expert_shard" and self._mesh.expert == 1 else a for a in operation.group.axes)
        group = self._groups[tuple(a for a in axes if self._mesh.axis(a) > 1)]
        n, ranks = len(operation.group.ranks), operation.group.ranks
        return group, list(range(n)) if _UNSORTED else sorted(range(n), key=lambda k: ranks[k])
