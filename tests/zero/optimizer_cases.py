"""Optimizers in a few lines each, in the dtype of their parameters: four of 2026, two of them element-wise and two of
whole matrices; and some that keep values or gradients in unusual places, which are right in plain PyTorch."""

from __future__ import annotations

from collections import deque
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


class Rebinding(Ruled):
    """Gives parameters other memory, as hand-written optimizers do."""

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data = p.data - 0.01 * p.grad


class Remembering(Ruled):
    """Keeps the last gradient itself, in its state or beside it."""

    beside = False

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        kept, key = vars(self) if self.beside else state, f"last {id(state)}"
        update = g + 0.5 * (g - kept.get(key, torch.zeros_like(g)))
        kept[key] = g
        return update


class RememberingBeside(Remembering):
    beside = True


class Collecting(Ruled):
    """Keeps the last two gradients in a list, and views of them."""

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        history = state.setdefault("history", deque(maxlen=2))
        history.append(g.view(-1))
        return torch.stack(list(history)).mean(0).view_as(g)


class Accumulating(Ruled):
    """Its momentum is the first gradient."""

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        state["momentum"] = state["momentum"].mul_(0.9).add_(g) if "momentum" in state else g
        return state["momentum"]


class Packed(Tensor):
    """Keeps its values in 16 bits, as 8-bit optimizers keep their states in 8; it owns no memory."""

    halves: Tensor

    @staticmethod
    def __new__(cls, halves: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, halves.shape, dtype=torch.float64)
        made.halves = halves
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one.halves.double() if isinstance(one, Packed) else one for one in args]
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Packed):
            args[0].halves.copy_(given[1])
            return args[0]
        return func(*given, **(kwargs or {}))


class Packing(Ruled):
    """Its momentum is of another tensor class."""

    def rule(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        momentum = state.setdefault("momentum", Packed(torch.zeros(g.shape, dtype=torch.bfloat16)))
        momentum.copy_(momentum * 0.9 + g)
        return momentum * 1
