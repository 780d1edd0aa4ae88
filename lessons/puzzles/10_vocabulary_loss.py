"""Puzzle 10: a cross entropy over a cut vocabulary, without gathering logits.

Fill in ``solve``: return the sum over tokens of the cross entropy.  ``logits`` has this rank's quarter of the
vocabulary for each token, ``targets`` ids of the whole vocabulary.  The judge calls backward: ``logits`` must get the
gradient of one process.  A rank may send what an all-reduce of three numbers per token sends.  Some logits are large,
so subtract the largest of all ranks.  Lesson 15 has the idea.

    plait lesson check 10
"""

import torch
import torch.nn.functional as F
from plait_lessons.judge import off, over
from torch import Tensor

import plait

RANKS, TOKENS, VOCABULARY = 4, 10, 64


def solve(comm: plait.Comm, logits: Tensor, targets: Tensor) -> Tensor:
    raise NotImplementedError


def judge(solve) -> list[str]:
    torch.manual_seed(0)
    logits = 500 * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64)
    logits[::2] /= 500
    logits.requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    loss = F.cross_entropy(logits, targets, reduction="sum")
    loss.backward()

    def body(comm: plait.Comm) -> tuple[Tensor, Tensor | None, int]:
        piece = logits.detach().chunk(RANKS, 1)[comm.rank].clone().requires_grad_()
        found = solve(comm, piece, targets.clone())
        found.backward()
        return found.detach(), piece.grad, comm.ledger.sent

    problems = []
    for rank, (found, grad, sent) in enumerate(plait.run_threads(f"tensor={RANKS}", body, deadline=5.0)):
        problems += off(f"rank {rank}, loss", found, loss, 1e-9)
        problems += off(f"rank {rank}, gradient", grad, logits.grad.chunk(RANKS, 1)[rank], 1e-12)
        problems += over(f"rank {rank} sends", sent, 3 * 2 * (RANKS - 1) * 8 * TOKENS // RANKS)
    return problems
