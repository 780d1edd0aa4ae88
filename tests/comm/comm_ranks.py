"""What one process of the process-world tests does: ``python comm_ranks.py <scene> <mesh> <deadline>``."""

from __future__ import annotations

import os
import sys
import time

import comm_checks
import torch

from plait.comm import MismatchError, ProcessComm, init
from plait.comm.messages import checksum, header_of
from plait.core.collectives import Note
from plait.core.mesh import Mesh


def everything(comm: ProcessComm) -> None:
    for check in comm_checks.EVERYTHING:
        check(comm)
        comm.barrier(("pipe", "replica", "shard", "tensor"))
    assert sum(len(b) for b in comm._spare.values()) < 12  # buffers are used again
    comm.sends.clear()  # what rank 1 refused above is never taken


def gone(comm: ProcessComm) -> None:
    """Rank 1 dies between two operations; the others hear it at once, and again at their next call."""
    comm.barrier(("shard",))
    if comm.rank == 1:
        os._exit(0)
    time.sleep(0.2)
    started = time.monotonic()
    for _ in range(2):
        try:
            comm.all_reduce(torch.ones(10), ("shard",), note=Note("backward", "blocks.1")).wait()
        except ConnectionError as error:
            print(error)
        else:
            raise AssertionError("no error")
    assert time.monotonic() - started < 6, "not at once"


def disagree(comm: ProcessComm) -> None:
    """Each rank in another unit: nobody crashes, all reach the deadline and say where they were."""
    work = comm.all_gather(torch.empty(6), torch.empty(2), ("shard",), Note("forward", f"blocks.{comm.rank}", 2))
    try:
        work.wait()
    except OSError as error:
        print(error)
    else:
        raise AssertionError("no error")


def line(comm: None) -> None:
    """The script face on three ranks; the last handle is dropped, and close() still delivers the message."""
    world = init(deadline=10)
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
    if world.rank == 1:
        world.send_tensor(torch.ones(3, 4), 0)
    if world.rank == 0:
        try:
            world.recv_tensor((4, 3), 1)
        except MismatchError as error:
            assert "float32 (4, 3)" in str(error) and "float32 (3, 4)" in str(error)
            world.comm.barrier(("pipe",))
            world.close()
            return
        raise AssertionError("taken in")
    world.comm.barrier(("pipe",))
    if world.rank == 1:
        world.comm.sends.clear()  # what rank 0 refused is never taken
        world.send_tensor(torch.full((3,), 5.0), 2)  # and this one is taken late: close() waits for it
    if world.rank == 2:
        time.sleep(0.5)
        assert torch.equal(world.recv_tensor((3,), 1), torch.full((3,), 5.0))
    world.close()


def late(comm: ProcessComm) -> None:
    """The header of a message comes shortly before the deadline, and the message never: one deadline for both."""
    message = torch.ones(5)
    if comm.rank == 0:
        time.sleep(0.8 * comm.deadline)
        call = comm._message("send", message, 1, Note("late"))
        for work, _ in comm._post(call, header_of(message), 1, checksum("header", 0, 1, 0)):
            work.wait()
        time.sleep(comm.deadline)
        os._exit(0)
    started = time.monotonic()
    try:
        (comm.recv_new(0) if comm.rank == 1 else comm.recv(message, 0)).wait()
    except OSError:
        print(f"{(time.monotonic() - started) / comm.deadline:.2f} deadlines")
        os._exit(0)
    raise AssertionError("no error")


def alone(comm: ProcessComm) -> None:
    comm_checks.check_collectives(comm)


SCENES = {f.__name__: f for f in (everything, gone, disagree, late, line, alone)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    scene, mesh, deadline = sys.argv[1], Mesh.parse(sys.argv[2]), float(sys.argv[3])
    if scene == "line":
        line(None)
    else:
        comm = ProcessComm.from_env(mesh, deadline=deadline)
        SCENES[scene](comm)
        comm.close()
    print("done")
