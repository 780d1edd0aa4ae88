"""Ranks as processes, over torch.distributed.

Every operation is made of point-to-point messages, straight into place, and reductions are done here in the order of
``ordered_reduce.py``:

    all_gather       piece -> everyone's slot                           no copy
    reduce_scatter   slice k -> member k's receive buffer, then reduce  deterministic
    all_reduce       small, or two ranks: whole -> everyone, reduce
                     else: reduce_scatter, then all_gather              2 (n-1)/n of the bytes

This is deterministic *and* faster than gloo's own collectives (figures in decision 013).  A group is just a list of
ranks, so one process group serves all axes in all orders.

A message's tag is a checksum of the operation's meaning (kind, axes, size, dtype, unit, a running number).  So two
ranks in different operations both reach their deadline, and each error names both operations, instead of a crash inside
the library.  The transport moves single messages: ``gloo.py``, or ``nccl.py`` for GPUs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.base import Comm, Operation, Work
from plait.comm.checks import label
from plait.comm.deadline import clock
from plait.comm.environment import WorldVariables, own_device
from plait.comm.gloo import GlooTransport
from plait.comm.init_process import make_group, meet_ranks
from plait.comm.nccl import NcclTransport
from plait.comm.operation import DONE, NO_NOTE, Group, copied
from plait.comm.ordered_reduce import ordered_sum
from plait.comm.process_identity import Peer, hosts_of, on_hosts
from plait.comm.transport import SHARED_MEMORY, Started, Transport
from plait.table.mesh import Mesh

if TYPE_CHECKING:
    from plait.torch_private import Store

SMALL_BYTES = 4 * 2**20
"""An all-reduce that receives no more than this sends whole tensors: one round of messages instead of two."""

DESCRIPTIONS = 1
"""The tag of a check's descriptions: gloo keeps the order of messages with one tag."""

MOST_TAGS = 4096
"""The most checksums that are kept."""

MOST_SENDS = 1024
"""The most sends under way; one more waits for the oldest of them, whose handle may have been dropped."""


class P2PWork:
    """Messages, and the last step that follows them; ``under_way`` keeps them until a wait."""

    def __init__(
        self,
        transport: Transport,
        operation: Operation,
        works: list[Started],
        under_way: dict[int, P2PWork],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._transport, self._operation, self._works, self._finish = transport, operation, works, finish
        self._under_way = under_way
        under_way[id(self)] = self

    def wait(self) -> None:
        """Waits for the messages, then finishes; a second call does nothing."""
        if self._under_way.get(id(self)) is not self:
            return
        try:
            self._transport.wait(self._operation, self._works)
        finally:
            del self._under_way[id(self)]
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None


class ProcessComm(Comm):
    """One process's access to the others."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        store: Store,
        peers: Sequence[Peer] = (),
        *,
        device: torch.device | str = "cpu",
        deadline: float = 30.0,
        deterministic: bool = True,
        shared_memory: bool = False,
    ) -> None:
        super().__init__(mesh, rank, device=device, deadline=deadline, deterministic=deterministic)
        self.peers, self.store = tuple(peers), store
        self.transport: Transport
        if shared_memory and self.device.type != "cpu":
            raise ValueError(f"shared memory moves tensors of CPUs, and this world is on {self.device}: leave it out")
        if shared_memory:
            self.transport = import_module(SHARED_MEMORY).transport(self)
        elif self.device.type == "cuda":
            self.transport = NcclTransport(self)
        else:
            self.transport = GlooTransport(self)
        self._under_way: dict[int, P2PWork] = {}
        self._tags: dict[tuple[object, ...], int] = {}
        """Checksums of the meanings of operations; the repr of one costs more than a small message."""
        self.sends: dict[int, P2PWork] = {}  # under way, to other ranks, the oldest first
        self._closed = False
        self._borrows = False
        """True if torch's process group existed before, and stays."""

    @classmethod
    def from_env(
        cls,
        mesh: Mesh,
        *,
        device: torch.device | str = "cpu",
        deadline: float = 30.0,
        deterministic: bool = True,
        facts: Mapping[str, str] | None = None,
        shared_memory: bool = False,
    ) -> ProcessComm:
        """Joins the world that torchrun's variables describe.

        Args:
            facts: further values that must be the same on all ranks, by name.
            shared_memory: a host's ranks exchange CPU tensors through memory that they share.

        Raises:
            ValueError: variables are missing or wrong, the number of processes is not the mesh's, ranks differ, this
                process has already joined a world, or an existing process group of torch's does not fit.
            ConnectionError, TimeoutError: as in ``meet_ranks`` and ``make_group``.
        """
        from plait import __version__  # which imports this

        place = WorldVariables.read(ranks=mesh.size)
        place.check(mesh)
        device = own_device(device)
        if not shared_memory:
            _check_group(place)
        there = dist.is_initialized()
        alike = {
            "mesh": str(mesh),
            "torch's process group": "made before" if there else "to be made",
            "shared memory": str(shared_memory),
            "device": device.type,
            "deterministic": str(deterministic),
            "torch": str(torch.__version__),
            "plait": __version__,
            **(facts or {}),
        }

        end = clock() + deadline
        met = meet_ranks(place, deadline, alike)
        sockets = not shared_memory or len(hosts_of(met.peers)) > 1
        if sockets and there:
            _check_group(place)
        elif sockets:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            make_group(place, met, backend, max(1.0, end - clock()))
        how: dict[str, Any] = {"device": device, "deadline": deadline, "deterministic": deterministic}
        mesh = on_hosts(mesh, met.peers) if device.type == "cpu" else mesh
        comm = cls(mesh, place.rank, met.store, met.peers, shared_memory=shared_memory, **how)
        comm.attempt, comm._borrows = met.attempt, there
        if comm.transport.over_sockets:
            _in_use.append(dist.group.WORLD)
        return comm

    @property
    def overlaps(self) -> bool:
        return self.transport.progresses and super().overlaps

    def close(self) -> None:
        """Waits for the sends whose handles were dropped, then leaves the world."""
        if self._closed:
            return
        self._closed = True
        try:
            while self.sends and not self.transport.broken:
                next(iter(self.sends.values())).wait()
        finally:
            self.transport.close()
            super().close()
            if dist.is_initialized() and self.transport.over_sockets:
                _in_use.clear()
                if not self._borrows:
                    dist.destroy_process_group()

    # ---- collectives ---------------------------------------------------------------------------

    def _all_gather(self, operation: Operation, out: Tensor, piece: Tensor) -> Work:
        if (works := self.transport.library(operation, out, piece)) is not None:
            return self._work(operation, works)
        slots = out.tensor_split(len(operation.group.ranks))
        copied(mine := slots[operation.group.index], piece)
        works = self.transport.exchange(operation, slots, [mine] * len(slots), self._tag(operation))
        return self._work(operation, works)

    def _reduce_scatter(self, operation: Operation, out: Tensor, whole: Tensor) -> Work:
        if (works := self.transport.library(operation, out, whole)) is not None:
            return self._work(operation, works)
        slices = whole.tensor_split(len(operation.group.ranks))
        return self._exchanged(operation, slices[operation.group.index], slices, out, self._tag(operation))

    def _all_reduce(self, operation: Operation, tensor: Tensor) -> Work:
        if (works := self.transport.library(operation, tensor, tensor)) is not None:
            return self._work(operation, works)
        n = len(operation.group.ranks)
        tag = self._tag(operation)
        if n == 2 or n * tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            return self._exchanged(operation, tensor, [tensor] * n, tensor, tag)
        chunk = -(-tensor.numel() // n)
        slices = [tensor[k * chunk : (k + 1) * chunk] for k in range(n)]
        mine = slices[operation.group.index]
        works, add = self.transport.reduce(operation, mine, slices, mine, tag)
        then = self._tag(operation)

        def gather() -> None:  # the second phase begins when this rank waits
            if add is not None:
                add()
            self._work(operation, self.transport.exchange(operation, slices, [mine] * n, then)).wait()

        return self._work(operation, works, gather)

    def _exchanged(self, operation: Operation, mine: Tensor, slices: Sequence[Tensor], out: Tensor, tag: int) -> Work:
        """Sends slice k to member k, and reduces the received slices and ``mine`` into ``out``."""
        works, finish = self.transport.reduce(operation, mine, slices, out, tag)
        return self._work(operation, works, finish)

    def _broadcast(self, operation: Operation, tensor: Tensor) -> Work:
        if (works := self.transport.library(operation, tensor, tensor)) is not None:
            return self._work(operation, works)
        is_root = operation.group.index == operation.root
        parts = [tensor] * len(operation.group.ranks) if is_root else None
        return self._work(operation, self._rooted(operation, parts, tensor, to_root=False))

    def _scatter(self, operation: Operation, out: Tensor, whole: Tensor | None) -> Work:
        slices = None if whole is None else whole.tensor_split(len(operation.group.ranks))
        if slices is not None:
            copied(out, slices[operation.root])
        return self._work(operation, self._rooted(operation, slices, out, to_root=False))

    def _reduce(self, operation: Operation, tensor: Tensor) -> Work:
        if operation.group.index != operation.root:
            return self._work(operation, self._rooted(operation, None, tensor, to_root=True))
        stack = [tensor.new_empty(len(tensor)) for _ in operation.group.ranks]
        stack[operation.root] = tensor
        works = self._rooted(operation, stack, tensor, to_root=True)
        return self._work(operation, works, lambda: ordered_sum(stack, operation.group.sizes, operation.op, tensor))

    def _gather(self, operation: Operation, out: Tensor | None, piece: Tensor) -> Work:
        slots = None if out is None else out.tensor_split(len(operation.group.ranks))
        if slots is not None:
            copied(slots[operation.root], piece)
        return self._work(operation, self._rooted(operation, slots, piece, to_root=True))

    def _all_to_all(self, operation: Operation, out: Tensor, whole: Tensor) -> Work:
        n, index = len(operation.group.ranks), operation.group.index
        slots, slices = out.tensor_split(n), whole.tensor_split(n)
        slots[index].copy_(slices[index])
        return self._work(operation, self.transport.exchange(operation, slots, slices, self._tag(operation)))

    def _barrier(self, operation: Operation) -> None:
        n = len(operation.group.ranks)
        slots = torch.zeros(n, dtype=torch.uint8).tensor_split(n)
        works = self.transport.exchange(operation, slots, [slots[operation.group.index]] * n, self._tag(operation))
        self._work(operation, works).wait()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        own = self.transport.empty(numel, dtype) if numel else None
        return super().empty(numel, dtype) if own is None else own

    def _common(self, group: Group, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self.transport.common(Operation("common memory", group, NO_NOTE, numel, dtype))

    def wait_for_readers(self) -> None:
        self.transport.wait_for_readers()

    def wrote_common(self, *, later: bool = False) -> None:
        self.transport.wrote_common(later=later)

    # ---- messages ------------------------------------------------------------------------------

    def _send(self, operation: Operation, tensor: Tensor, dst: int) -> Work:
        works = self.transport.send(operation, tensor, dst, self._message_tag(operation, tensor))
        while len(self.sends) >= MOST_SENDS:
            next(iter(self.sends.values())).wait()
        return P2PWork(self.transport, operation, works, self.sends)

    def _recv(self, operation: Operation, tensor: Tensor, src: int) -> Work:
        return self._work(operation, self.transport.recv(operation, tensor, src, self._message_tag(operation, tensor)))

    def _tell(self, operation: Operation, row: Tensor, dst: int) -> Work:
        return self._work(operation, self.transport.send(operation, row, dst, DESCRIPTIONS))

    def _hear(self, operation: Operation, row: Tensor, src: int) -> None:
        self._work(operation, self.transport.recv(operation, row, src, DESCRIPTIONS)).wait()

    def _abandon(self, why: str) -> None:
        self.transport.give_up(why)

    def _message_tag(self, operation: Operation, tensor: Tensor) -> int:
        """Includes shape and dtype, so that a receiver never takes in a message of another kind."""
        return _checksum(label(tensor), operation.group.ranks, self._number("message", *operation.group.ranks))

    # ---- what they are made of -----------------------------------------------------------------

    def _work(self, operation: Operation, works: list[Started], finish: Callable[[], None] | None = None) -> Work:
        if not works and finish is None:
            return DONE
        return P2PWork(self.transport, operation, works, self._under_way, finish)

    def _rooted(
        self, operation: Operation, parts: Sequence[Tensor] | None, mine: Tensor, *, to_root: bool
    ) -> list[Started]:
        """Moves part k of the root to or from ``mine`` of member k; ``parts`` is None off the root."""
        ranks, tag = operation.group.ranks, self._tag(operation)
        move = self.transport.send if to_root == (parts is None) else self.transport.recv
        if parts is None:
            return move(operation, mine, ranks[operation.root], tag)
        others = ((rank, part) for rank, part in zip(ranks, parts, strict=True) if rank != self.rank)
        return [work for rank, part in others for work in move(operation, part, rank, tag)]

    def _tag(self, operation: Operation) -> int:
        members = tuple(sorted(operation.group.ranks))
        key = (*operation.meaning, members)
        if key not in self._tags:
            if len(self._tags) >= MOST_TAGS:
                self._tags.clear()
            self._tags[key] = zlib.crc32(repr(key).encode())
        return zlib.crc32(self._number(members).to_bytes(8), self._tags[key]) & 0x7FFFFFFF


_in_use: list[Any] = []
"""torch's default process group, while a world that this process joined sends messages over it."""


def _check_group(place: WorldVariables) -> None:
    """Refuses torch's default process group, if there is one, unless it has these ranks, is free, and has gloo."""
    if not dist.is_initialized():
        return
    group, have = dist.group.WORLD, dist.get_backend_config()
    if any(one is group for one in _in_use):
        raise ValueError("this process has joined a world already: close() that world first")
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        here, said = f"rank {dist.get_rank()} of {dist.get_world_size()}", f"RANK={place.rank}, WORLD_SIZE={place.size}"
        fix = "make the process group of all ranks in their order, or none before joining"
        raise ValueError(f"torch's process group has this process as {here}, but the environment has {said}: {fix}")
    if "cpu:gloo" not in have.split(","):
        fix = "make it with backend 'gloo' or 'cpu:gloo,cuda:nccl'"
        raise ValueError(f"torch's process group has {have}, and plait sends tensors of CPUs by gloo: {fix}")


def _checksum(*parts: object) -> int:
    """Returns a tag of 31 bits.  Python's own hash differs from process to process; this one does not."""
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF
