"""The small face for scripts, inside a thread world."""

import torch
from plait_lessons.script import init

from plait.comm import Comm, run
from plait.table.mesh import Mesh


def test_a_tensor_goes_down_the_line() -> None:
    def script(comm: Comm) -> float:
        world = init(comm)
        before, after = world.get_prev_rank(), world.get_next_rank()
        x = torch.ones(3) if before is None else world.recv_tensor((3,), before)
        if after is not None:
            world.send_tensor(x + 1, after)
        world.close()
        return float(x[0])

    assert run(Mesh(pipe=4), script) == [1.0, 2.0, 3.0, 4.0]


def test_the_line_has_ends() -> None:
    ends = run(Mesh(pipe=3), lambda c: (init(c).get_prev_rank(), init(c).rank, init(c).get_next_rank()))
    assert ends == [(None, 0, 1), (0, 1, 2), (1, 2, None)]


def test_what_lies_scattered_in_memory_is_sent_as_it_reads() -> None:
    def script(comm: Comm) -> torch.Tensor:
        world, x = init(comm), torch.arange(6.0).view(2, 3)
        if world.rank == 0:
            world.send_tensor(x.t(), 1)
            return x.t()
        return world.recv_tensor((3, 2), 0)

    sent, got = run(Mesh(pipe=2), script)
    assert torch.equal(sent, got)
