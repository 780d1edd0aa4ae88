"""Puzzle 4: a reduce-scatter from messages.

Fill in ``solve``: return this rank's piece of the sum of all ranks' ``x``.  Use comm.send(tensor, rank) and
comm.recv(tensor, rank).wait() only, and add in the order of ranks, so that the bits are those of plait's own.  A rank
may send (n - 1) / n of the array.  Lesson 5 has the idea.

    plait lesson check 4
"""

import torch
from plait_lessons.judge import off, over
from torch import Tensor

import plait

RANKS, NUMEL = 4, 1000


def solve(comm: plait.Comm, x: Tensor) -> Tensor:
    raise NotImplementedError


def terms(rank: int) -> Tensor:
    """Numbers whose sum depends on the order: a large one comes from rank 1."""
    return torch.linspace(1, 2, NUMEL) * (2.0**22 if rank == 1 else rank + 1)


def judge(solve) -> list[str]:
    def body(comm: plait.Comm) -> tuple[Tensor, int, set[str]]:
        found = solve(comm, terms(comm.rank))
        return found, comm.ledger.sent, {entry.kind for entry in comm.ledger}

    total = sum((terms(rank) for rank in range(1, RANKS)), terms(0)).chunk(RANKS)
    problems = []
    for rank, (found, sent, kinds) in enumerate(plait.run_threads(f"shard={RANKS}", body, deadline=5.0)):
        problems += off(f"rank {rank}", found, total[rank])
        problems += over(f"rank {rank} sends", sent, (RANKS - 1) * 4 * NUMEL // RANKS)
        problems += [f"uses {kind}, which is to be built" for kind in sorted(kinds - {"send", "recv"}) if rank == 0]
    return problems
