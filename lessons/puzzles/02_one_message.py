"""Puzzle 2: data parallel in one message.

Fill in ``solve``: afterwards each tensor of ``gradients`` is its sum over the ranks, in place.  There are eight, and
a rank may ask for one collective and send 2 (n - 1) / n of their bytes: small messages cost their latency (lesson 4).

    plait lesson check 2
"""

import torch
from plait_lessons.judge import off, over

import plait

RANKS, SHAPES = 4, [(4, 4), (4,), (8, 4), (8,), (2, 8), (2,), (10,), (4, 1)]


def solve(comm: plait.Comm, gradients: list[torch.Tensor]) -> None:
    raise NotImplementedError


def judge(solve) -> list[str]:
    def body(comm: plait.Comm) -> tuple[list[torch.Tensor], int, int]:
        gradients = [torch.full(shape, float(comm.rank + i)) for i, shape in enumerate(SHAPES)]
        solve(comm, gradients)
        return gradients, len(comm.ledger), comm.ledger.sent

    most, problems = 2 * (RANKS - 1) * 4 * sum(torch.Size(shape).numel() for shape in SHAPES) // RANKS, []
    for rank, (found, messages, sent) in enumerate(plait.run_threads(f"shard={RANKS}", body, deadline=5.0)):
        for i, (gradient, shape) in enumerate(zip(found, SHAPES, strict=True)):
            problems += off(
                f"rank {rank}, tensor {i}", gradient, torch.full(shape, float(sum(range(RANKS)) + RANKS * i))
            )
        problems += over(f"rank {rank} asks for", messages, 1, "collectives") + over(f"rank {rank} sends", sent, most)
    return problems
