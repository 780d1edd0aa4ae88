"""Puzzle 3: an update with a quarter of Adam's state.

Fill in ``solve``: make one step of AdamW (lr=0.01) on ``parameters``, a flat vector that all ranks have, with the sum
of all ranks' ``gradient``, in place.  Return the optimizer.  It keeps state for a quarter of the elements, and a rank
may send no more than data parallel does.  Lesson 10 has the idea.

    plait lesson check 3
"""

import torch
from plait_lessons.judge import off, over

import plait

RANKS, NUMEL = 4, 256


def solve(comm: plait.Comm, parameters: torch.Tensor, gradient: torch.Tensor) -> torch.optim.Optimizer:
    raise NotImplementedError


def judge(solve) -> list[str]:
    start = torch.linspace(-1, 1, NUMEL)
    whole = torch.nn.Parameter(start.clone())
    whole.grad = torch.linspace(1, 2, NUMEL) * sum(range(1, RANKS + 1))
    torch.optim.AdamW([whole], lr=0.01).step()

    def body(comm: plait.Comm) -> tuple[torch.Tensor, int, int]:
        parameters = start.clone()
        optimizer = solve(comm, parameters, torch.linspace(1, 2, NUMEL) * (comm.rank + 1))
        state = sum(s["exp_avg"].numel() + s["exp_avg_sq"].numel() for s in optimizer.state.values())
        return parameters, state, comm.ledger.sent

    most, problems = 2 * (RANKS - 1) * 4 * NUMEL // RANKS, []
    for rank, (found, state, sent) in enumerate(plait.run_threads(f"shard={RANKS}", body, deadline=5.0)):
        problems += off(f"rank {rank}, parameters", found, whole, 1e-6)
        if state < NUMEL // 2:
            problems.append(
                f"rank {rank} keeps {state} numbers of state in the optimizer, where its quarter has {NUMEL // 2}"
            )
        problems += over(f"rank {rank} keeps", state, NUMEL // 2, "numbers of state")
        problems += over(f"rank {rank} sends", sent, most)
    return problems
