"""Fault 3: a hand-written backward that leaves out layer 0.

The loss falls almost as it should.  Read the loop's bounds.

    plait lesson find 3
"""

import copy
from collections.abc import Callable, Iterable

import torch
from plait_lessons.witnessed import verdict
from torch import Tensor, nn

torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh()) for _ in range(6)))
X = torch.randn(32, 16)


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().sum()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def loop(fixed: bool, losses: list[float]) -> Callable:
    def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, comm: object = None) -> None:
        for _ in range(3):
            inputs, h = [], X
            for layer in model:
                inputs.append(h)
                h = layer(h).detach()
            losses.append((h - X.flip(1)).square().sum().item() / len(X))
            gradient = 2 * (h - X.flip(1)) / len(X)
            for i in range(len(model) - 1, -1 if fixed else 0, -1):
                h, weight = inputs[i].detach().requires_grad_(), model[i][0].weight
                gradient, weight.grad = torch.autograd.grad(model[i](h), (h, weight), gradient)
            optimizer.step()

    return train


def main() -> None:
    wrong, right = [], []
    for fixed, losses in ((False, wrong), (True, right)):
        model = copy.deepcopy(MODEL)
        loop(fixed, losses)(model, sgd(model.parameters()))
        stuck = [i for i, (a, b) in enumerate(zip(model, MODEL, strict=True)) if torch.equal(a[0].weight, b[0].weight)]
        print(f"{'fixed' if fixed else 'with the fault'}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, stuck: {stuck}")
        assert stuck == ([] if fixed else [0]) and losses[-1] < losses[0]
    named, proved = (verdict(loop(fixed, []), MODEL, sgd, loss_sum, X) for fixed in (False, True))
    print("verdict, plait's own:", named)
    assert "gradient of 0.0.weight" in named
    print("the fix: range(5, -1, -1), or reversed(range(6)); and a test that every parameter moves")
    print("its verdict:", proved)
    assert "the run of a single process" in proved
