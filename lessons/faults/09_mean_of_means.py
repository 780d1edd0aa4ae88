"""Fault 9: the mean of two means.

Two microbatches, one with 40 samples and one with 8.  Each has a mean loss, and the step takes the mean of both.  How
much does one sample of the small microbatch count?

    plait lesson find 9
"""

import copy

import torch
from torch import Tensor, nn

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(16, 16, dtype=torch.float64), nn.Tanh(), nn.Linear(16, 16, dtype=torch.float64))
X = torch.randn(48, 16, dtype=torch.float64)
PARTS = [X[:40], X[40:]]


def gradient(parts: list[Tensor], fixed: bool) -> Tensor:
    model = copy.deepcopy(MODEL)
    for x in parts:
        loss = (model(x) - x.flip(1)).square().sum()
        (loss / len(X) if fixed else loss / len(x) / len(parts)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def main() -> None:
    whole = gradient([X], fixed=True)
    for name, fixed in (("mean of means", False), ("sum / count", True)):
        error = (gradient(PARTS, fixed) - whole).abs().max() / whole.abs().max()
        print(f"{name:14} relative error {error:.1e}")
        assert (error < 1e-12) == fixed
    equal = gradient([X[:24], X[24:]], fixed=False)
    assert (equal - whole).abs().max() < 1e-12, "equal counts hide it"
    print(f"verdict: a sample of the small microbatch counts {40 / 8:g} times as much; with equal counts nothing shows")
    print('the fix: sum the losses, divide once by the count of all: engine.backward(loss, count, reduction="mean")')
