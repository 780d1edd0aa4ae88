"""The small face for scripts, inside a thread world."""

import torch
from plait_lessons.script import init

from plait.comm import Comm, run
from plait.table.mesh import Mesh


def test_a_tensor_goes_down_a_line_that_has_ends() -> None:
    def script(comm: Comm) -> tuple[int, int | None, int | None, float]:
        world = init(comm)
        before, after = world.get_prev_rank(), world.get_next_rank()
        x = torch.ones(3) if before is None else world.recv_tensor((3,), before)
        if after is not None:
            world.send_tensor(x + 1, after)
        world.close()
        return world.rank, before, after, float(x[0])

    assert run(Mesh(pipe=3), script) == [(0, None, 1, 1.0), (1, 0, 2, 2.0), (2, 1, None, 3.0)]


def test_what_lies_scattered_in_memory_is_sent_as_it_reads() -> None:
    def script(comm: Comm) -> torch.Tensor:
        world, x = init(comm), torch.arange(6.0).view(2, 3)
        if world.rank == 0:
            world.send_tensor(x.t(), 1)
            return x.t()
        return world.recv_tensor((3, 2), 0)

    sent, got = run(Mesh(pipe=2), script)
    assert torch.equal(sent, got)
