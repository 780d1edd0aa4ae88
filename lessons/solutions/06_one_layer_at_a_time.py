"""A solution of puzzle 6: no name outlives its layer, and autograd sees one layer at a time."""

from collections.abc import Callable

import torch
from torch import Tensor


def solve(gather: Callable[[int], Tensor], reduce: Callable[[int, Tensor], None], x: Tensor, y: Tensor) -> None:
    inputs, h = [], x
    for i in range(6):
        inputs.append(h)
        h = torch.tanh(h @ gather(i).T)  # without a name, the weight is freed here
    gradient = 2 * (h - y)
    for i in reversed(range(6)):
        gradient = backward(i, inputs[i], gradient, gather, reduce)


def backward(i: int, h: Tensor, gradient: Tensor, gather: Callable, reduce: Callable) -> Tensor:
    h, weight = h.detach().requires_grad_(), gather(i).requires_grad_()
    for_input, for_weight = torch.autograd.grad(torch.tanh(h @ weight.T), (h, weight), gradient)
    reduce(i, for_weight)
    return for_input
