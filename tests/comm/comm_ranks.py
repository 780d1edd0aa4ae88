"""One process of the process-world tests: ``python comm_ranks.py <scene> <mesh> <deadline>``."""

import os
import re
import socket
import sys
import time
from typing import Any

import collective_faults
import comm_checks
import pytest
import torch
import torch.distributed as dist
from plait_lessons.script import init

import plait
from plait.comm import ProcessComm
from plait.comm.gloo import GlooTransport
from plait.comm.nccl import NcclTransport
from plait.referee.sanitize import sanitized
from plait.referee.sanitize.collectives import check_collectives
from plait.referee.sanitize.drift import DriftCheck
from plait.run.models import gpt, moe
from plait.shared_memory.several_hosts import HostsTransport
from plait.table.collectives import Note
from plait.table.mesh import Mesh


def world(mesh: Mesh, deadline: float) -> ProcessComm:
    shared, *hosts = sys.argv[4:] or [""]
    if hosts:  # a letter for each rank's
        socket.gethostname = lambda: hosts[0][int(os.environ["RANK"])]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return ProcessComm.from_env(mesh, deadline=deadline, shared_memory=shared == "shared")


def everything(comm: ProcessComm) -> None:
    for check in comm_checks.EVERYTHING:
        check(comm)
        comm.barrier(("pipe", "replica", "shard", "tensor"))
    both = isinstance(comm.transport, HostsTransport)
    for transport in (comm.transport.inside, comm.transport.across) if both else (comm.transport,):
        if isinstance(transport, GlooTransport):
            assert sum(len(b) for b in transport._spare.values()) < 12  # buffers are used again
        else:
            assert sum(s.size for s in transport.arena._segments) <= 2**26  # and blocks


def gone(comm: ProcessComm) -> None:
    """Rank 1 dies between two operations; the others hear it at once, and again at their next call."""
    comm.barrier(("shard",))
    if comm.rank == 1:
        os._exit(0)
    time.sleep(0.2)
    for _ in range(2):
        with pytest.raises(ConnectionError) as caught:
            comm.all_reduce(torch.ones(10), ("shard",), note=Note("backward", "blocks.1")).wait()
        print(caught.value)


def ring(comm: ProcessComm) -> None:
    """Ranks 0, 1 on a host, 2, 3 on another.  Rank 0 waits for 2, which waits for 3, which waits for 1, which waits for
    what 0 has begun to send through shared memory: it goes on while 0 waits."""
    a, b = ("shard",), ("replica",)
    pieces, number = torch.full((2**23,), float(comm.rank)), torch.ones(1)
    steps = {
        "begin": lambda: comm.all_gather(torch.empty(2**24), pieces, a),
        "across": lambda: comm.all_reduce(number, b).wait(),
    }
    order = {0: ("begin", "across", "end"), 1: ("begin", "end", "across")}
    order |= {2: ("begin", "end", "across"), 3: ("across", "begin", "end")}
    begun: Any = None
    for step in order[comm.rank]:
        if step == "end":
            begun.wait()
        elif step == "begin":
            begun = steps["begin"]()
        else:
            steps["across"]()
    assert number.item() == 2


def disagree(comm: ProcessComm) -> None:
    """Each rank is in another unit: none crashes, all reach the deadline and say where they were."""
    work = comm.all_gather(torch.empty(6), torch.empty(2), ("shard",), Note("forward", f"blocks.{comm.rank}", 2))
    with pytest.raises(OSError) as caught:
        work.wait()
    print(caught.value)


def line(comm: None) -> None:
    """The script face on three ranks; the last handle is dropped, and close() still delivers the message."""
    world = init(deadline=30)
    before, after = world.get_prev_rank(), world.get_next_rank()
    assert before == (world.rank - 1 if world.rank else None)
    assert after == (world.rank + 1 if world.rank + 1 < world.world_size else None)
    x = torch.ones(4, 2) if before is None else world.recv_tensor((4, 2), before)
    if after is not None:
        world.send_tensor((x + 1).t().contiguous().t(), after)  # not contiguous
        if world.rank == 0:
            time.sleep(1.0)  # the receiver is gone by then
    else:
        assert torch.equal(x, torch.full((4, 2), float(world.world_size)))
    world.comm.barrier(("pipe",))
    if world.rank == 1:
        world.send_tensor(torch.full((3,), 5.0), 2)  # taken late: close() waits for it
    if world.rank == 2:
        time.sleep(0.5)
        assert torch.equal(world.recv_tensor((3,), 1), torch.full((3,), 5.0))
    world.close()


def other_shape(comm: ProcessComm) -> None:
    """A message of another shape than was asked for is never taken in: both deadlines name it."""
    wrong, wanted = torch.ones(3, 4), torch.ones(4, 3)
    with pytest.raises(OSError) as caught:
        (comm.send(wrong, 1, Note("wrong")) if comm.rank == 0 else comm.recv(wanted, 0, Note("wanted"))).wait()
    print(caught.value)


class GpuTransportOnGloo(NcclTransport):
    """The transport of GPUs, as far as gloo can play nccl: groups, lanes, channels, orders; all tensors go its way."""

    BACKEND = "gloo"

    @staticmethod
    def _takes(tensor: torch.Tensor) -> bool:
        return True

    def exchange(self, operation: Any, slots: Any, slices: Any, tag: int) -> Any:
        return GlooTransport.exchange(self, operation, slots, slices, tag)  # gloo has no all_to_all of lists


def as_on_gpus(comm: ProcessComm) -> None:
    """The same checks, over the GPUs' transport; with ``deterministic=False`` sums of numbers that round nowhere."""
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    axes = ("shard",)
    for deterministic in (True, False):
        comm.deterministic = deterministic
        comm.transport = GpuTransportOnGloo(comm)
        works, whole = [], torch.arange(4.0 * comm.mesh.shard)
        works.append(comm.all_gather(gathered := torch.empty(2 * comm.mesh.shard), whole[:2] + comm.rank, axes))
        works.append(comm.reduce_scatter(piece := torch.empty(4), whole.clone(), axes))
        works.append(comm.all_reduce(largest := torch.tensor([float(comm.rank)]), axes, "max"))
        for work in works:
            work.wait()
        ranks = comm.mesh.group(comm.rank, axes)
        assert torch.equal(gathered.view(-1, 2)[:, 0], torch.tensor([float(r) for r in ranks])), gathered
        index = comm.mesh.index(comm.rank, axes)
        assert torch.equal(piece, whole[4 * index : 4 * index + 4] * len(ranks)), piece
        assert largest.item() == max(ranks)
    comm.deterministic = True
    comm.transport = GpuTransportOnGloo(comm)
    for check in (
        comm_checks.check_collectives,
        comm_checks.check_under_way,
        comm_checks.check_messages,
        comm_checks.check_headers,
        comm_checks.check_many_messages_before_any_is_taken,
        comm_checks.check_gather_bytes,
        comm_checks.check_refused_messages,
    ):
        check(comm)
        comm.barrier(("pipe", "replica", "shard", "tensor"))


def training_on_gpus(comm: ProcessComm) -> None:
    """Steps of a mixture of experts, all checks on: every group that is asked for is there."""
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    comm.transport = GpuTransportOnGloo(comm)
    with plait.empty_parameters():
        sizes = moe.MoEConfig(17, num_layers=2, width=8, num_kv_heads=4, hidden=8, max_length=8, dropout=0.0)
        model = moe.MoE(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sanitized(comm).engine_watchers += (lambda engine: DriftCheck(engine, 1),)
    engine = plait.Engine(
        model, comm, optimizer=optimizer, loss_fn=moe.loss_sum, count_fn=gpt.token_count, clip=1.0,
        sequence_parallel=comm.mesh.tensor > 1, all_to_all=comm.mesh.expert == 2,
    )  # fmt: skip
    tokens = torch.arange(16).view(2, 8) + comm.data_rank
    for _ in range(2):
        engine.step([{"tokens": tokens % 17, "targets": tokens % 17}])
    engine.full_state_dict()


def checked(comm: ProcessComm) -> None:
    """Faults, each in a separate world: every rank gets the error at once, by the check or by a rank that has left."""
    check_collectives(comm)
    for check in comm_checks.EVERYTHING:
        check(comm)
    comm.close()
    for name in collective_faults.IN_PROCESSES[:: 1 if comm.world_size == 3 else 3]:
        comm = world(comm.mesh, comm.deadline)
        fault, words = collective_faults.FAULTS[name]
        text = collective_faults.told(comm, fault, 1)
        assert re.search(words, text, re.S), (name, text)
        assert all(re.search(rf"rank {rank}: .* at comm/collective_faults.py:", text) for rank in (0, 1)), text
        comm.close()


def alone(comm: ProcessComm) -> None:
    comm_checks.check_collectives(comm)


def on_a_group(_: None) -> None:
    """Other code, such as Ray, has made torch's process group: it is used, and left as it was."""
    mesh, given = Mesh.parse(sys.argv[2]), dict(os.environ)
    dist.init_process_group("gloo")
    for shared in (False, True, False):
        comm = world(mesh, 20) if not shared else ProcessComm.from_env(mesh, deadline=20, shared_memory=True)
        comm_checks.check_collectives(comm)
        if not shared:
            refused("has joined a world already", mesh)
        comm.close()
        total = torch.tensor([comm.rank + 1.0])
        dist.all_reduce(total)
        assert total == mesh.size * (mesh.size + 1) / 2
    os.environ["RANK"] = str(mesh.size - 1 - comm.rank)
    refused(rf"as rank {comm.rank} of 2, but the environment has RANK={1 - comm.rank}, WORLD_SIZE=2", mesh)
    os.environ.update(given)
    dist.destroy_process_group()
    world(mesh, 20).close()
    assert not dist.is_initialized()


def refused(told: str, mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=told):
        ProcessComm.from_env(mesh, deadline=20)


if __name__ == "__main__":
    torch.set_num_threads(1)
    scene, mesh, deadline = sys.argv[1], Mesh.parse(sys.argv[2]), float(sys.argv[3])
    comm = None if scene in ("line", "on_a_group") else world(mesh, deadline)
    globals()[scene](comm)
    if comm is not None:
        comm.close()
    print("done")
