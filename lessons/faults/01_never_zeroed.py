"""Fault 1: gradients that are never zeroed.

The loss falls faster than expected at first, then it overshoots and stalls.  Which line is missing?  Decide from the
loop below, then run it: plait lesson find 1
"""

import copy
from collections.abc import Callable, Iterable

import torch
from plait_lessons.witnessed import verdict
from torch import Tensor, nn

torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh()) for _ in range(4)))
X = torch.randn(48, 32)


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1).sin()).square().mean(1).sum()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=6.0)


def loop(fixed: bool, steps: int, losses: list[float]) -> Callable:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, comm: object = None) -> None:
        for _ in range(steps):
            if fixed:
                optimizer.zero_grad()
            loss = loss_sum(model, X) / len(X)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    return train


def main() -> None:
    wrong, right = [], []
    for fixed, losses in ((False, wrong), (True, right)):
        model = copy.deepcopy(MODEL)
        loop(fixed, 20, losses)(model, sgd(model.parameters()))
    print("losses with the fault", [round(x, 3) for x in wrong[::4]], " fixed", [round(x, 3) for x in right[::4]])
    assert right == sorted(right, reverse=True) and wrong[-1] > right[-1]
    named, proved = (verdict(loop(fixed, 3, []), MODEL, sgd, loss_sum, X) for fixed in (False, True))
    print("verdict, plait's own:", named)
    assert "step 1, gradient" in named and "zero_grad is left out" in named
    print("the fix: optimizer.zero_grad() before each backward; plait's engine starts every step's sums anew")
    print("its verdict:", proved)
    assert "the run of a single process" in proved
