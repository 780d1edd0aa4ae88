"""Optimizers that leave values, or gradients, where nobody looks for them: right in plain PyTorch, and here."""

from __future__ import annotations

from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import batches, distinct, loss_sum
from torch import nn


class Rebinding(torch.optim.Optimizer):
    """Gives parameters other memory, as hand-written optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class Remembering(torch.optim.Optimizer):
    """Keeps the last gradient itself, in its state or beside it."""

    beside = False

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = vars(self) if self.beside else self.state[p]
                    key = f"last {id(p)}"
                    last = state.get(key, torch.zeros_like(p))
                    p.add_(p.grad + 0.5 * (p.grad - last), alpha=-group["lr"])
                    state[key] = p.grad


class RememberingBeside(Remembering):
    beside = True


class Accumulating(torch.optim.Optimizer):
    """Its momentum is the first gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "momentum" in state:
                        state["momentum"].mul_(0.9).add_(p.grad)
                    else:
                        state["momentum"] = p.grad
                    p.add_(state["momentum"], alpha=-group["lr"])


@pytest.mark.parametrize("optimizer", [Rebinding, Remembering, RememberingBeside, Accumulating])
@pytest.mark.parametrize(("mesh", "row"), [("shard=1", "ddp"), ("shard=3", "zero1"), ("replica=2 shard=2", "zero3")])
def test_an_optimizer_makes_what_it_makes_in_a_single_process(optimizer: Any, mesh: str, row: str) -> None:
    template, data = distinct(nn.Sequential(nn.Linear(cases.WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))), batches(5)
    truth = cases.plain(template, data, optimizer, loss_sum, None)
    cases.agree(cases.train(template, mesh, row, data, optimizer), truth)
