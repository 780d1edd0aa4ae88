"""Puzzle 6: ZeRO-3 with one layer in memory at a time.

Fill in ``solve``: forward and backward of six layers ``h = tanh(h @ w.T)`` on this rank's samples ``x``, with the
loss ``(h - y).square().sum()``.  ``gather(i)`` brings layer i's weight, for which every rank has a quarter, and
``reduce(i, gradient)`` takes its gradient.  Only one weight may be in memory at a time, copies included, and each
may be gathered twice.  Lesson 11 has the idea; note how long a name or autograd keeps a weight.

    plait lesson check 6
"""

from collections.abc import Callable

import torch
from plait_lessons.judge import Alive, off, over
from torch import Tensor

import plait
from plait.run.course.memory import HeldBytes

RANKS, LAYERS, WIDTH = 4, 6, 16


def solve(gather: Callable[[int], Tensor], reduce: Callable[[int, Tensor], None], x: Tensor, y: Tensor) -> None:
    raise NotImplementedError


def judge(solve) -> list[str]:
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4 for _ in range(LAYERS)]
    x = torch.randn(RANKS, 8, WIDTH, dtype=torch.float64)
    leaves, h = [w.clone().requires_grad_() for w in weights], x
    for w in leaves:
        h = torch.tanh(h @ w.T)
    (h - x.flip(2)).square().sum().backward()

    size = 8 * WIDTH * WIDTH

    def body(comm: plait.Comm) -> tuple[dict[int, Tensor], int, int, int]:
        alive, found = Alive(), {}

        def gather(i: int) -> Tensor:
            whole = alive.add(torch.empty_like(weights[i]))
            comm.all_gather(whole, weights[i].chunk(RANKS)[comm.rank].clone(), ("shard",)).wait()
            return whole

        def reduce(i: int, gradient: Tensor) -> None:
            found[i] = torch.empty(WIDTH // RANKS, WIDTH, dtype=gradient.dtype)
            comm.reduce_scatter(found[i], gradient.contiguous(), ("shard",)).wait()

        mine = x[comm.rank].clone()
        with HeldBytes(at_least=size) as copies:
            solve(gather, reduce, mine, mine.flip(1))
        return found, alive.most, copies.peak, comm.ledger.sent

    problems = []
    for rank, (found, most, copied, sent) in enumerate(plait.run_threads(f"shard={RANKS}", body, deadline=5.0)):
        for i, leaf in enumerate(leaves):
            problems += off(f"rank {rank}, gradient {i}", found.get(i), leaf.grad.chunk(RANKS)[rank], 1e-12)
        problems += over(f"rank {rank} has {most} weights at once:", most * size, size)
        problems += over(f"rank {rank}, a weight, its gradient and copies of weights:", copied, 2 * size)
        problems += over(f"rank {rank} sends", sent, 3 * (RANKS - 1) * LAYERS * size // RANKS)
    return problems
