"""Puzzle 9: a tensor-parallel MLP with one all-reduce forward and one backward.

Fill in ``solve``: return ``relu(x @ W1.T) @ W2.T``, the same on every rank.  ``w1`` has this rank's rows of W1,
``w2`` its columns of W2.  The judge calls backward on the result: x, w1 and w2 must get the gradients of one process.
Lesson 15 has the idea; a torch.autograd.Function may talk in its backward.

    plait lesson check 9
"""

import torch
from plait_lessons.judge import off, over
from torch import Tensor

import plait

RANKS, SAMPLES, WIDTH, HIDDEN = 4, 6, 8, 32


def solve(comm: plait.Comm, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    raise NotImplementedError


def judge(solve) -> list[str]:
    torch.manual_seed(0)
    shapes = ((SAMPLES, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    x, w1, w2 = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    y = torch.relu(x @ w1.T) @ w2.T
    y.square().sum().backward()

    def body(comm: plait.Comm) -> tuple[Tensor, list[Tensor | None], list[tuple[str, int]], int]:
        pieces = x, w1.chunk(RANKS)[comm.rank], w2.chunk(RANKS, 1)[comm.rank]
        leaves = [piece.detach().clone().requires_grad_() for piece in pieces]
        found = solve(comm, *leaves)
        forward = len(comm.ledger)
        found.square().sum().backward()
        counts = [("forward", forward), ("backward", len(comm.ledger) - forward)]
        return found.detach(), [leaf.grad for leaf in leaves], counts, comm.ledger.sent

    problems = []
    for rank, (found, grads, counts, sent) in enumerate(plait.run_threads(f"tensor={RANKS}", body, deadline=5.0)):
        problems += off(f"rank {rank}, output", found, y, 1e-12)
        expected = x.grad, w1.grad.chunk(RANKS)[rank], w2.grad.chunk(RANKS, 1)[rank]
        for name, grad, whole in zip(("x", "w1", "w2"), grads, expected, strict=True):
            problems += off(f"rank {rank}, gradient of {name}", grad, whole, 1e-11)
        for way, count in counts:
            problems += over(f"rank {rank} asks {way} for", count, 1, "collectives")
        problems += over(f"rank {rank} sends", sent, 2 * 2 * (RANKS - 1) * 8 * SAMPLES * WIDTH // RANKS)
    return problems
