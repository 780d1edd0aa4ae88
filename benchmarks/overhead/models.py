"""Models whose arithmetic costs next to nothing, so that what is left of a step is bookkeeping.

``chain`` and ``scalars`` are many small units one after the other; ``operators`` is a few units around many
element-wise functions that read no parameter.  Values stay of size 1 however deep the chain is: a number that
underflows would be slow arithmetic, and measured as an engine's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROWS = 2
"""The rows of a batch."""


class Scalar(nn.Module):
    """The smallest unit: one parameter, one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Pair(nn.Module):
    """Two linear layers, one cut by columns and the other by rows where there is a tensor axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = linear(width), linear(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


class Adding(nn.Module):
    """A user's forward: a linear layer, then ``number`` additions of a constant."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.linear, self.number = linear(width), number

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(self.number):
            x = x + 1e-6
        return x


def linear(width: int) -> nn.Linear:
    layer = nn.Linear(width, width)
    nn.init.orthogonal_(layer.weight)
    return layer


def chain(units: int, width: int) -> nn.Module:
    return nn.Sequential(*(linear(width) for _ in range(units)))


def scalars(units: int, width: int) -> nn.Module:
    return nn.Sequential(*(Scalar() for _ in range(units)))


def pairs(units: int, width: int) -> nn.Module:
    return nn.Sequential(*(Pair(width) for _ in range(units // 2)))


def adding(number: int, width: int) -> nn.Module:
    """Custom forwards: a half of the operators in each of two modules."""
    return nn.Sequential(Adding(width, number // 2), Adding(width, number // 2))


def stock(number: int, width: int) -> nn.Module:
    """Only torch's own modules: a half of the operators after each of two linear layers."""
    layers = (nn.Sequential(*(nn.Hardtanh(-100, 100) for _ in range(number // 2))) for _ in range(2))
    return nn.Sequential(*(module for layer in layers for module in (linear(width), layer)))


@dataclass(frozen=True)
class Model:
    """A recipe: ``size`` is its number of units, or of operators."""

    name: str
    make: Callable[[int, int], nn.Module]
    size: int
    width: int
    plan: tuple[tuple[str, str], ...] = ()
    """The tensor plan."""

    def build(self) -> nn.Module:
        """A fresh copy; the same bits on every rank and for every contestant."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make(self.size, self.width)

    def batch(self, microbatches: int = 1) -> list[Tensor]:
        """The same on every rank, so that one process computes the same loss."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(ROWS, self.width, generator=generator) for _ in range(microbatches)]


def owners(model: nn.Module) -> list[str]:
    """The modules that own a parameter: each is to be a unit."""
    return [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()
