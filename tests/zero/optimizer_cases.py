"""Optimizers of 2026 in a few lines each, in the dtype of their parameters: two element-wise, two of whole matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Ruled(Optimizer):
    """Decays each parameter and adds ``-lr * rule(gradient, state)``."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.mul_(1 - 0.1 * group["lr"]).add_(self.rule(p.grad, self.state[p]), alpha=-group["lr"])

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lion(Ruled):
    """Source: Chen et al. 2023 (arXiv:2302.06675)."""

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        m = state.setdefault("m", torch.zeros_like(g))
        update = m.lerp(g, 0.1).sign()
        m.lerp_(g, 0.01)
        return update


class AdEMAMix(Ruled):
    """Two averages of the gradient, one of them slow.  Source: Pagliardini et al. 2024 (arXiv:2409.03137)."""

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        fast, slow, square = (state.setdefault(key, torch.zeros_like(g)) for key in ("fast", "slow", "square"))
        fast.lerp_(g, 0.1), slow.lerp_(g, 0.0001), square.lerp_(g * g, 0.001)
        return (fast / 0.1 + 5 * slow) / ((square / 0.001).sqrt() + 1e-4)


class Orthogonal(Ruled):
    """Muon, which torch's class computes in bf16.  Source: Jordan 2024 (kellerjordan.github.io/posts/muon)."""

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        x = state.setdefault("m", torch.zeros_like(g)).mul_(0.9).add_(g)
        if g.dim() != 2:
            return x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x


class Shampoo(Ruled):
    """A matrix between roots of its gradients' products.  Source: Gupta et al. 2018 (arXiv:1802.09568)."""

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        if g.dim() != 2:
            return g
        for key, product in (("left", g @ g.T), ("right", g.T @ g)):
            g = self.root(state.setdefault(key, torch.zeros_like(product)).add_(product), g, left=key == "left")
        return g

    @staticmethod
    def root(sums: Tensor, g: Tensor, *, left: bool) -> Tensor:
        values, vectors = torch.linalg.eigh(sums + 0.1 * torch.eye(len(sums), dtype=g.dtype))
        root = vectors @ torch.diag(values**-0.25) @ vectors.T
        return root @ g if left else g @ root
