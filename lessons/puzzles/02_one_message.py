"""Puzzle 2: data parallel in one message.

Fill in ``solve``: afterwards each tensor of ``gradients`` is its sum over the ranks, in place.  There are eight, and a
rank may ask for one collective and send 2 (n - 1) / n of their bytes: small messages cost their latency (lesson 4).

    plait lesson check 2
"""

import torch

import plait

RANKS, SHAPES = 4, [(4, 4), (4,), (8, 4), (8,), (2, 8), (2,), (10,), (4, 1)]


def solve(comm: plait.Comm, gradients: list[torch.Tensor]) -> None:
    raise NotImplementedError


def judge(solve) -> list[str]:
    def body(comm: plait.Comm) -> tuple[int, int, int]:
        gradients = [torch.full(shape, float(comm.rank + i)) for i, shape in enumerate(SHAPES)]
        solve(comm, gradients)
        sums = [torch.full(shape, float(sum(r + i for r in range(RANKS)))) for i, shape in enumerate(SHAPES)]
        wrong = sum(not torch.equal(g, s) for g, s in zip(gradients, sums, strict=True))
        return wrong, len(comm.ledger), comm.ledger.sent

    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    most = 2 * (RANKS - 1) * 4 * numel // RANKS
    problems = []
    for rank, (wrong, messages, sent) in enumerate(plait.run_threads(f"shard={RANKS}", body, deadline=5.0)):
        problems += [f"rank {rank}: {wrong} of {len(SHAPES)} tensors are not the sum"] * (wrong > 0)
        problems += [f"rank {rank} asks for {messages} collectives, {messages - 1} too many"] * (messages > 1)
        problems += [f"rank {rank} sends {sent} bytes, {sent - most} too many"] * (sent > most)
    return problems
