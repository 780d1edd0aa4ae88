"""Fault 9: the mean of two means.

Two microbatches, one with 40 samples and one with 8.  Each has a mean loss, and the step takes the mean of both.  How
much does one sample of the small microbatch count?

    plait lesson find 9
"""

from collections.abc import Callable, Iterable

import torch
from plait_lessons.witnessed import verdict
from torch import Tensor, nn

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(16, 16, dtype=torch.float64), nn.Tanh(), nn.Linear(16, 16, dtype=torch.float64))
X = torch.randn(48, 16, dtype=torch.float64)


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().sum()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def loop(parts: list[Tensor], fixed: bool) -> Callable:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, comm: object) -> None:
        for x in parts:
            loss = loss_sum(model, x)
            (loss / len(X) if fixed else loss / len(x) / len(parts)).backward()
        optimizer.step()

    return train


def main() -> None:
    uneven, even = [X[:40], X[40:]], [X[:24], X[24:]]
    named, proved = (verdict(loop(uneven, fixed), MODEL, sgd, loss_sum, X) for fixed in (False, True))
    hidden = verdict(loop(even, fixed=False), MODEL, sgd, loss_sum, X)
    print("two microbatches of 24 samples:", hidden)
    print("verdict, plait's own:", named)
    assert "forward 0 of rank 0 counts 3/5 times and forward 1 of rank 0 counts 3 times" in named
    assert "the run of a single process" in hidden
    print('the fix: sum the losses, divide once by the count of all: engine.backward(loss, count, reduction="mean")')
    print("its verdict:", proved)
    assert "the run of a single process" in proved
