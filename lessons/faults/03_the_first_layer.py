"""Fault 3: a hand-written backward that leaves out layer 0.

The loss falls almost as it should.  Read the loop's bounds.

    plait lesson find 3
"""

import torch
from torch import Tensor

torch.manual_seed(0)
WEIGHTS = [torch.randn(16, 16) / 4 for _ in range(6)]
X = torch.randn(32, 16)


def train(fixed: bool) -> tuple[list[float], list[Tensor]]:
    weights = [w.clone() for w in WEIGHTS]
    losses = []
    for _ in range(10):
        inputs, h = [], X
        for w in weights:
            inputs.append(h)
            h = torch.tanh(h @ w.T)
        losses.append((h - X.flip(1)).square().mean().item())
        gradient = 2 * (h - X.flip(1)) / h.numel()
        for i in range(len(weights) - 1, -1 if fixed else 0, -1):
            h, w = inputs[i].detach().requires_grad_(), weights[i].detach().requires_grad_()
            gradient, for_weight = torch.autograd.grad(torch.tanh(h @ w.T), (h, w), gradient)
            weights[i] = weights[i] - 2.0 * for_weight
    return losses, weights


def main() -> None:
    (wrong, after), (right, fixed) = train(fixed=False), train(fixed=True)
    print(f"loss with the fault {wrong[0]:.3f} -> {wrong[-1]:.3f}, fixed {right[0]:.3f} -> {right[-1]:.3f}")
    stuck = [i for i, (a, b) in enumerate(zip(after, WEIGHTS, strict=True)) if torch.equal(a, b)]
    print(f"verdict: layers {stuck} have not moved by a bit; range(5, 0, -1) ends before 0")
    assert stuck == [0] and wrong[-1] < wrong[0]
    assert not any(torch.equal(a, b) for a, b in zip(fixed, WEIGHTS, strict=True))
    print("the fix: range(5, -1, -1), or reversed(range(6)); and a test that every parameter moves")
