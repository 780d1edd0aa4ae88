"""Puzzle 5: ZeRO-1 by owner, for an optimizer that needs whole matrices.

Fill in ``solve``: make one step of Adafactor (lr=0.01) on ``parameters``, which all ranks have, with the sum of all
ranks' ``p.grad``, in place.  Return the optimizer.  It may look at no more than 1,024 numbers of parameters on any
rank, and all ranks together may send no more than data parallel does.  Lesson 10 has the idea; the sizes differ, so
choose the owners.

    plait lesson check 5
"""

import copy

import torch
from plait_lessons.judge import off, over
from torch import nn

import plait

RANKS, MOST = 4, 1024
SHAPES = [(32, 32), (16, 16), (16, 32), (16, 16), (32, 32), (16, 16), (32, 16), (16, 16)]


def solve(comm: plait.Comm, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    raise NotImplementedError


def judge(solve) -> list[str]:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in SHAPES]
    gradients = [[torch.randint(-9, 10, shape).float() for shape in SHAPES] for _ in range(RANKS)]
    expected = [nn.Parameter(value.clone()) for value in start]
    for p, *terms in zip(expected, *gradients, strict=True):
        p.grad = sum(terms[1:], terms[0])
    torch.optim.Adafactor(expected, lr=0.01).step()

    def body(comm: plait.Comm) -> tuple[list[nn.Parameter], int, int]:
        parameters = [nn.Parameter(value.clone()) for value in start]
        for p, gradient in zip(parameters, copy.deepcopy(gradients[comm.rank]), strict=True):
            p.grad = gradient
        optimizer = solve(comm, parameters)
        return parameters, sum(p.numel() for p in optimizer.state), comm.ledger.sent

    problems, sent = [], 0
    for rank, (found, seen, bytes_sent) in enumerate(plait.run_threads(f"shard={RANKS}", body, deadline=5.0)):
        for i, (p, whole) in enumerate(zip(found, expected, strict=True)):
            problems += off(f"rank {rank}, parameter {i}", p, whole)
        problems += over(f"rank {rank}'s optimizer looks at", seen, MOST, "numbers")
        sent += bytes_sent
    return problems + over("all ranks send", sent, 2 * (RANKS - 1) * 4 * sum(p.numel() for p in expected))
