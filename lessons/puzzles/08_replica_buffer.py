"""Puzzle 8: partially sharded data parallel, with one message between replicas.

Fill in ``solve`` for a mesh of two replicas with two data ranks each.  ``parameters`` is this rank's half of a flat
vector, cut over the axis ``shard`` and equal in both replicas.  ``gradient(whole, m)`` is the gradient of microbatch
``m`` for the whole vector.  Return this rank's quarter of the sum of all ranks' gradients: its half, cut once more
over ``replica``.  In a step a rank may send one message over ``replica``, however many microbatches there are.
Lesson 14 has the idea.

    plait lesson check 8
"""

from collections.abc import Callable

import torch
from plait_lessons.judge import off, over
from torch import Tensor

import plait

MESH, NUMEL, MICROBATCHES = "replica=2 shard=2", 64, 4


def solve(comm: plait.Comm, parameters: Tensor, gradient: Callable[[Tensor, int], Tensor], microbatches: int) -> Tensor:
    raise NotImplementedError


def judge(solve) -> list[str]:
    torch.manual_seed(0)
    start = torch.randint(-3, 4, (NUMEL,)).double()  # whole numbers: every order of additions gives the same bits
    samples = torch.randint(-3, 4, (4, MICROBATCHES, NUMEL)).double()
    half, half_volume = NUMEL // 2, 8 * NUMEL // 2

    def body(comm: plait.Comm) -> tuple[Tensor, list[int], int]:
        own, place = start.chunk(2)[comm.mesh.index(comm.rank, ("shard",))], samples[comm.rank]
        found = solve(comm, own.clone(), lambda whole, m: whole * place[m], MICROBATCHES)
        across = [entry.sent for entry in comm.ledger if "replica" in entry.axes]
        return found, across, comm.ledger.sent - sum(across)

    total, problems = (start * samples).sum((0, 1)), []
    for rank, (found, across, inside) in enumerate(plait.run_threads(MESH, body, deadline=5.0)):
        quarter = (rank % 2) * half + (rank // 2) * half // 2
        problems += off(f"rank {rank}", found, total[quarter : quarter + half // 2])
        problems += over(f"rank {rank} takes part in", len(across), 1, "messages over replica")
        problems += over(f"rank {rank} sends over replica", sum(across), half_volume // 2)
        problems += over(f"rank {rank} sends over shard", inside, 2 * MICROBATCHES * half_volume)
    return problems
