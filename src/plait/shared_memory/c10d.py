"""Shared memory as a back end of torch.distributed, for any program on the CPUs of one Linux host.

.. code-block:: python

    import plait.shared_memory.c10d
    torch.distributed.init_process_group("plait_shm")      # or "cpu:plait_shm"

torch's own DDP, FSDP2, DTensor, pipelining and checkpoints run on it as they are.  Sums are added in rank order, so a
run has the same bits each time.  Every process group is a world of its own.

A collective is done when its call returns, also with ``async_op=True``: no thread moves data meanwhile.
A message is out of its tensor when ``isend`` returns; ``irecv`` waits in ``wait()``.  A group has this back end for all
of its tensors: one of "cpu:plait_shm,cuda:nccl" takes no tensors of GPUs, so make two groups.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from plait.comm.deadline import clock
from plait.comm.operation import NO_NOTE, Operation, pair_of
from plait.comm.process import ProcessComm
from plait.comm.process_identity import Peer
from plait.comm.store_rendezvous import wait_for_keys
from plait.shared_memory.transport import SharedMemoryTransport
from plait.table.mesh import Mesh

_c10d: Any = torch._C._distributed_c10d  # torch's stubs leave some of it out
_Group: Any = dist.ProcessGroup
_Work: Any = _c10d.Work

NAME = "plait_shm"
AXES = ("shard",)
LEAVE_SECONDS = 60.0
"""Seconds that a process that ends waits until the others know where its last messages are."""


class SharedMemoryGroup(_Group):  # type: ignore[misc]
    """A process group whose ranks share memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        deadline = timeout.total_seconds()
        peers = _meet(store, rank, size, deadline)
        if far := [peer for peer in peers if peer.host != peers[rank].host]:
            text = f"{NAME} joins the ranks of one host: {peers[rank]} and {far[0]} are on two"
            raise ValueError(f"{text}. Give cpu:gloo, or plait's own world with shared_memory=True")
        self._comm = ProcessComm(Mesh(shard=size), rank, store, peers, deadline=deadline, shared_memory=True)
        assert isinstance(self._comm.transport, SharedMemoryTransport)
        self._transport = self._comm.transport
        self._leave = weakref.finalize(self, _close, self._comm)  # also when the program ends

    # What torch asks of a group, and its C++ keeps only where there are backends of its own.

    def getBackendName(self) -> str:  # noqa: N802  # torch calls it so
        return NAME

    def _get_backend(self, device: Any) -> Any:
        return self

    group_name = group_desc = ""

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text

    def shutdown(self) -> None:
        self._leave()

    abort = shutdown

    # ---- reductions --------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        op = (opts or _c10d.AllreduceOptions()).reduceOp
        for tensor in _several(tensors):
            with _contiguous(tensor) as whole:
                self._all_reduce(whole, op)
        return self._done(tensors)

    def _all_reduce(self, whole: Tensor, op: Any) -> None:
        self._comm.all_reduce(whole, AXES, _name(op)).wait()
        self._divide(whole, op)

    def _divide(self, total: Tensor, op: Any) -> None:
        """Divides a sum once where the operation is a mean."""
        if op == dist.ReduceOp.AVG:
            total.div_(self._comm.world_size)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            with _contiguous(tensor) as whole:
                self._comm.reduce(whole, AXES, opts.rootRank, _name(opts.reduceOp)).wait()
                if self._comm.rank == opts.rootRank:
                    self._divide(whole, opts.reduceOp)
        return self._done(tensors)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        op = (opts or _c10d.ReduceScatterOptions()).reduceOp
        with _contiguous(output) as out:
            self._comm.reduce_scatter(out, whole.contiguous(), AXES, _name(op)).wait()
            self._divide(out, op)
        return self._done(output)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        opts = opts or _c10d.ReduceScatterOptions()
        for output, pieces in zip(outputs, inputs, strict=True):
            if len({piece.numel() for piece in pieces}) == 1:
                self.reduce_scatter_single(output, torch.cat([piece.reshape(-1) for piece in pieces]), opts)
                continue
            for rank, piece in enumerate(pieces):  # uneven ones, one after the other
                self._all_reduce(whole := piece.reshape(-1).clone(), opts.reduceOp)
                if rank == self._comm.rank:
                    output.copy_(whole.view_as(output))
        return self._done(outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return self._done(outputs)

    # ---- gathers and scatters ----------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> Any:
        with _contiguous(output) as out:
            self._comm.all_gather(out, piece.contiguous(), AXES).wait()
        return self._done(output)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for slots, piece in zip(outputs, inputs, strict=True):
            if len({slot.numel() for slot in slots}) == 1:
                whole = piece.new_empty(len(slots) * piece.numel())
                self.all_gather_single(whole, piece)
                for slot, part in zip(slots, whole.chunk(len(slots)), strict=True):
                    slot.copy_(part.view_as(slot))
                continue
            for rank, slot in enumerate(slots):
                if rank == self._comm.rank:
                    slot.copy_(piece)
                self.broadcast([slot], _rooted(rank))
        return self._done(outputs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, piece in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, piece)
        return self._done(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            with _contiguous(tensor) as whole:
                self._comm.broadcast(whole, AXES, opts.rootRank).wait()
        return self._done(tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        root = self._comm.rank == opts.rootRank
        for i, piece in enumerate(inputs):
            whole = piece.new_empty(self._comm.world_size * piece.numel()) if root else None
            self._comm.gather(whole, piece.contiguous(), AXES, opts.rootRank).wait()
            if whole is not None:
                for slot, part in zip(outputs[i], whole.chunk(self._comm.world_size), strict=True):
                    slot.copy_(part.view_as(slot))
        return self._done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        root = self._comm.rank == opts.rootRank
        for i, output in enumerate(outputs):
            whole = torch.cat([piece.reshape(-1) for piece in inputs[i]]) if root else None
            with _contiguous(output) as out:
                self._comm.scatter(out, whole, AXES, opts.rootRank).wait()
        return self._done(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        rank = self._comm.rank
        for other, piece in enumerate(inputs):
            if other != rank:
                self.send([piece], other, -1)
        outputs[rank].copy_(inputs[rank].view_as(outputs[rank]))
        for other, slot in enumerate(outputs):
            if other != rank:
                self.recv([slot], other, -1).wait()
        return self._done(outputs)

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        n = self._comm.world_size
        for what, sizes in ((output, output_sizes), (whole, input_sizes)):
            if not sizes and len(what) % n:
                raise ValueError(f"all_to_all_single of {len(what)} rows over {n} ranks: give the sizes of the pieces")
        with _contiguous(output) as out:
            slots = out.split(output_sizes) if output_sizes else out.chunk(n)
            self.alltoall(list(slots), list(whole.split(input_sizes) if input_sizes else whole.chunk(n)))
        return self._done(output)

    def barrier(self, opts: Any = None) -> Any:
        self._comm.barrier(AXES)
        return self._done([])

    # torch's older names for the same
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        for tensor in tensors:
            data = tensor.detach().contiguous().view(-1)
            self._transport.send(self._message("send", data, dst), data, dst, _tag(tag))
        return self._done(tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        return AwaitedMessage(self, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        raise NotImplementedError(f"{NAME} takes no message from just anybody: name the rank that sends it")

    def _message(self, kind: str, tensor: Tensor, other: int) -> Operation:
        group = pair_of(self._comm.mesh, self._comm.rank, kind, other)
        return Operation(kind, group, NO_NOTE, tensor.numel(), tensor.dtype)

    def _done(self, result: Any) -> Any:
        """Returns the work of a complete operation."""
        self._comm.ledger.clear()  # it has no reader
        return _c10d._create_work_from_future(_future(result))


class AwaitedMessage(_Work):  # type: ignore[misc]
    """Messages that were requested but not yet received."""

    def __init__(self, group: SharedMemoryGroup, tensors: list[Tensor], src: int, tag: int) -> None:
        super().__init__()
        self._transport, self._tensors, self._src, self._tag = group._transport, tensors, src, _tag(tag)
        self._left = []
        for tensor in tensors:
            data = tensor.detach().contiguous()
            operation = group._message("recv", data, src)
            self._left.append((operation, self._transport.recv(operation, data.view(-1), src, self._tag), tensor, data))

    def wait(self, timeout: Any = None) -> bool:
        while self._left:
            self._take()
        return True

    def _take(self) -> None:
        operation, works, tensor, data = self._left.pop(0)
        self._transport.wait(operation, works)
        if not tensor.is_contiguous():
            tensor.detach().copy_(data)

    def is_completed(self) -> bool:
        while self._left and self._transport.has_come(self._src, self._tag):
            self._take()
        return not self._left

    def is_success(self) -> bool:
        return not self._left

    def source_rank(self) -> int:
        return self._src

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        self.wait()
        return _future(self._tensors)


REDUCTIONS = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "sum"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "and"),
    (dist.ReduceOp.BOR, "or"),
    (dist.ReduceOp.BXOR, "xor"),
]


def _name(op: Any) -> str:
    for known, name in REDUCTIONS:
        if op == known:
            return name
    raise NotImplementedError(f"{NAME} has no reduction {op}: it has sums, means, products, min, max and bits")


def _tag(tag: int) -> int:
    return zlib.crc32(f"torch's message {tag}".encode()) & 0x7FFFFFFF


@contextlib.contextmanager
def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the values in contiguous memory, and writes them back."""
    whole = tensor.detach()
    if whole.is_contiguous():
        yield whole
        return
    yield (copy := whole.contiguous())
    whole.copy_(copy)


def _several(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _rooted(rank: int) -> Any:
    opts = _c10d.BroadcastOptions()
    opts.rootRank = rank
    return opts


def _future(result: Any) -> Any:
    future: Any = Future()
    future.set_result(result)
    return future


def _meet(store: Any, rank: int, size: int, deadline: float) -> list[Peer]:
    """Exchanges and returns the processes of a group's ranks."""
    end = clock() + deadline
    store.set(f"plait/{rank}", Peer(rank, socket.gethostname(), os.getpid()).text)
    peers = []
    for other in range(size):
        if not wait_for_keys(store, [f"plait/{other}"], end):
            raise TimeoutError(f"{NAME}: rank {rank} of {size} waited {deadline:g} s for rank {other}")
        peers.append(Peer.parse(store.get(f"plait/{other}")))
    return peers


def _close(comm: ProcessComm) -> None:
    comm.transport.deadline = min(comm.transport.deadline, LEAVE_SECONDS)
    comm.close()


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
    return SharedMemoryGroup(store, rank, size, timeout)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
