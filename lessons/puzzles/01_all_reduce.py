"""Puzzle 1: an all-reduce from messages.

Fill in ``solve``: afterwards every rank has the sum of all ranks' ``x``, in place.  Use comm.send(tensor, rank) and
comm.recv(tensor, rank).wait() only.  A rank may send 2 (n - 1) / n of the array, whose length is a multiple of the
number of ranks.  Lesson 6 has the idea.

    plait lesson check 1
"""

import torch
from plait_lessons.judge import off, over

import plait

RANKS, NUMEL = 4, 1000


def solve(comm: plait.Comm, x: torch.Tensor) -> None:
    raise NotImplementedError


def judge(solve) -> list[str]:
    def body(comm: plait.Comm) -> tuple[torch.Tensor, int, set[str]]:
        x = torch.arange(float(NUMEL)) * (comm.rank + 1)
        solve(comm, x)
        return x, comm.ledger.sent, {entry.kind for entry in comm.ledger}

    found = plait.run_threads(f"shard={RANKS}", body, deadline=5.0)
    expected, most = torch.arange(float(NUMEL)) * sum(range(1, RANKS + 1)), 2 * (RANKS - 1) * 4 * NUMEL // RANKS
    problems = []
    for rank, (x, sent, kinds) in enumerate(found):
        problems += off(f"rank {rank}", x, expected) + over(f"rank {rank} sends", sent, most)
        problems += [f"uses {kind}, which is to be built" for kind in sorted(kinds - {"send", "recv"}) if rank == 0]
    return problems
