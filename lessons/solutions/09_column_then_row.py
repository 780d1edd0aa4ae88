"""A solution of puzzle 9: a pair of functions, each the other's mirror."""

from typing import Any

import torch
from torch import Tensor

import plait


def summed(comm: plait.Comm, x: Tensor) -> Tensor:
    x = x.contiguous().clone()
    comm.all_reduce(x, ("tensor",)).wait()
    return x


class Enter(torch.autograd.Function):
    """Sums the gradient over the ranks: each used x for its own features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: plait.Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(ctx.comm, grad), None


class Leave(torch.autograd.Function):
    """Sums the value over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: plait.Comm) -> Tensor:
        return summed(comm, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def solve(comm: plait.Comm, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return Leave.apply(torch.relu(Enter.apply(x, comm) @ w1.T) @ w2.T, comm)
