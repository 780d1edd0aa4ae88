"""Fault 4: every layer draws its values after seeding again.

A test of a sharding bug is green.  The bug: two ranks keep each other's layer.  Why does the test not see it?

    plait lesson find 4
"""

import torch
from torch import Tensor


def layers(fixed: bool) -> list[Tensor]:
    """Four weights; with the fault each begins at seed 0."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(4):
        if not fixed:
            generator.manual_seed(0)
        drawn.append(torch.randn(8, 8, generator=generator) / 8**0.5)
    return drawn


def output(weights: list[Tensor]) -> Tensor:
    h = torch.linspace(-1, 1, 24).view(3, 8)
    for w in weights:
        h = torch.tanh(h @ w.T)
    return h


def swapped(weights: list[Tensor]) -> list[Tensor]:
    """The sharding bug: layers 1 and 2 are on each other's rank."""
    return [weights[0], weights[2], weights[1], weights[3]]


def main() -> None:
    same, different = layers(fixed=False), layers(fixed=True)
    blind = torch.equal(output(same), output(swapped(same)))
    sees = not torch.equal(output(different), output(swapped(different)))
    print(f"layers seeded again: the test passes with the bug: {blind}; layers drawn in a row: it fails: {sees}")
    equal = [(i, j) for i in range(4) for j in range(i) if torch.equal(same[i], same[j])]
    print(f"verdict: {len(equal)} of 6 pairs of layers are identical, so no exchange of layers can show")
    assert blind and sees and len(equal) == 6
    assert not any(torch.equal(different[i], different[j]) for i in range(4) for j in range(i))
    print("the fix: seed once, then draw all layers; plait draws from the seed and the module's name")
