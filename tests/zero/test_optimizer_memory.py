"""Optimizers that keep values or gradients in unusual places: right in plain PyTorch, and here."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import batches, distinct, loss_sum
from torch import Tensor, nn

from plait.step import Engine, elementwise


class Optimizer(torch.optim.Optimizer):
    """Updates one parameter after the other."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def update(self, p: nn.Parameter, gradient: Tensor, lr: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"])


class Rebinding(Optimizer):
    """Gives parameters other memory, as hand-written optimizers do."""

    def update(self, p: nn.Parameter, gradient: Tensor, lr: float) -> None:
        p.data = p.data - lr * gradient


class Remembering(Optimizer):
    """Keeps the last gradient itself, in its state or beside it."""

    beside = False

    def update(self, p: nn.Parameter, gradient: Tensor, lr: float) -> None:
        state, key = vars(self) if self.beside else self.state[p], f"last {id(p)}"
        p.add_(gradient + 0.5 * (gradient - state.get(key, torch.zeros_like(p))), alpha=-lr)
        state[key] = gradient


class RememberingBeside(Remembering):
    beside = True


class Collecting(Optimizer):
    """Keeps the last two gradients in a list, and views of them."""

    def update(self, p: nn.Parameter, gradient: Tensor, lr: float) -> None:
        history = self.state[p].setdefault("history", deque(maxlen=2))
        history.append(gradient.view(-1))
        p.add_(torch.stack(list(history)).mean(0).view_as(p), alpha=-lr)


class Accumulating(Optimizer):
    """Its momentum is the first gradient."""

    def update(self, p: nn.Parameter, gradient: Tensor, lr: float) -> None:
        state = self.state[p]
        if "momentum" in state:
            state["momentum"].mul_(0.9).add_(gradient)
        else:
            state["momentum"] = gradient
        p.add_(state["momentum"], alpha=-lr)


KEEPING = (Remembering, RememberingBeside, Collecting, Accumulating)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (Rebinding, r"has replaced p\.data of its piece of '.*update in place"),
        *((kind, rf"{kind.__name__} keeps a gradient beyond its step.*p\.grad\.clone") for kind in KEEPING),
    ],
)
@pytest.mark.parametrize(("mesh", "row"), [("shard=1", "ddp"), ("shard=3", "zero1"), ("replica=2 shard=2", "zero3")])
def test_an_optimizer_that_leaves_the_engines_memory_is_refused(optimizer: Any, says: str, mesh: str, row: str) -> None:
    template, data = distinct(nn.Sequential(nn.Linear(cases.WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))), batches(2)
    with pytest.raises(ValueError, match=says):
        cases.train(template, mesh, row, data, lambda given: elementwise(optimizer(given)))


class Packed(Tensor):
    """Keeps its values in 16 bits, as the states of 8-bit optimizers do in 8: it has no memory of its own."""

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


class Packing(Optimizer):
    """Its momentum is of another tensor class."""

    def update(self, p: nn.Parameter, gradient: Tensor, lr: float) -> None:
        momentum = self.state[p].setdefault("momentum", Packed(torch.zeros(p.shape, dtype=torch.bfloat16)))
        momentum.copy_(momentum * 0.9 + gradient)
        p.add_(momentum * 1, alpha=-lr)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_a_state_of_another_tensor_class_trains_and_is_not_saved(row: str) -> None:
    template, data = distinct(nn.Sequential(nn.Linear(cases.WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))), batches(3)

    def look(engine: Engine) -> str:
        with pytest.raises((ValueError, RuntimeError), match=r"'momentum' of '.*' is a Packed, a tensor subclass"):
            engine.optimizer_state_dict()
        return ""

    made = partial(cases.train, template, "shard=2", row, data, lambda given: elementwise(Packing(given)))
    cases.agree(made(look=look), cases.plain(template, data, Packing, loss_sum, None), tolerance=1e-2)
