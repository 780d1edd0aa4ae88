"""A solution of puzzle 10: the largest logit, the sum of exponentials and the target's logit of each token."""

from typing import Any

import torch
from torch import Tensor

import plait


class CrossEntropy(torch.autograd.Function):
    """The gradient of a logit is its probability, less one for the target: no message is needed for it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, comm: plait.Comm) -> Tensor:
        largest = logits.amax(-1)
        comm.all_reduce(largest, ("tensor",), "max").wait()
        here = targets - comm.rank * logits.size(-1)
        inside = (here >= 0) & (here < logits.size(-1))
        rows, columns = inside.nonzero()[:, 0], here[inside]
        sums = torch.zeros(2, len(targets), dtype=logits.dtype)
        exponentials = (logits - largest[:, None]).exp()
        sums[0], sums[1, rows] = exponentials.sum(-1), logits[rows, columns]
        comm.all_reduce(sums, ("tensor",)).wait()
        gradient = exponentials / sums[0, :, None]
        gradient[rows, columns] -= 1
        ctx.save_for_backward(gradient)
        return (sums[0].log() + largest - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None, None


def solve(comm: plait.Comm, logits: Tensor, targets: Tensor) -> Tensor:
    return CrossEntropy.apply(logits, targets, comm)
