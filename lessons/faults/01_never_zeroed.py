"""Fault 1: gradients that are never zeroed.

The loss falls faster than expected at first, then it overshoots and stalls.  Which line is missing?  Decide from the
loop below, then run it: plait lesson find 1
"""

import copy

import torch
from torch import nn

torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh()) for _ in range(4)))
X = torch.randn(48, 32)
Y = X.flip(1).sin()


def train(fixed: bool, steps: int = 20) -> tuple[list[float], list[torch.Tensor]]:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=6.0)
    losses, gradients = [], []
    for _ in range(steps):
        if fixed:
            optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        gradients.append(model[0][0].weight.grad - own[0])
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def main() -> None:
    (wrong, left), (right, none) = train(fixed=False), train(fixed=True)
    print("losses with the fault", [round(x, 3) for x in wrong[::4]], " fixed", [round(x, 3) for x in right[::4]])
    assert right == sorted(right, reverse=True) and wrong[-1] > right[-1]
    print(f"verdict: from step 2 on, .grad is not this step's gradient: off by up to {left[1].abs().max():.4f}")
    assert left[1].abs().max() > 0 and all(not extra.any() for extra in none)
    print("the fix: optimizer.zero_grad() before each backward; plait's engine starts every step's sums anew")
