"""Forwards as fewer users write them: methods, hooks, transforms, complex numbers, weights that a forward writes."""

from __future__ import annotations

import torch
from parts import Child, Lin, Weight
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Sums(nn.Module):
    """Reads all its parameters in one loop, before its children run."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, c), nn.Linear(c, c, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total = sum(p.square().mean() for p in self.parameters())
        return self.b(self.a(x)) / (1 + total)


class ByMethod(nn.Module):
    """Its child's own method is called, not the child."""

    class Coder(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(c, c), nn.Parameter(torch.ones(c))

        def encode(self, x: Tensor) -> Tensor:
            return self.up(x)

        def decode(self, x: Tensor) -> Tensor:
            return x * self.down

    def __init__(self, c: int) -> None:
        super().__init__()
        self.coder = self.Coder(c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.coder.decode(self.coder.encode(x).tanh())


class CallsForward(Child):
    """``child.forward(x)``: no hook runs."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.child.forward(x)


class Quantized(Lin):
    """A straight-through estimator on the weight."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.lin.weight
        return x + F.linear(x, w + ((w * 8).round() / 8 - w).detach(), self.lin.bias)


class Auxiliary(Lin):
    """Leaves a term of the loss in an attribute, which the loss collects."""

    def __init__(self, c: int) -> None:
        super().__init__(c)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        self.auxiliary = 0.01 * h.square().sum()
        return x + h.tanh()


class Mapped(nn.Module):
    """A parameter under vmap."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c, c))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda sample: sample + torch.tanh(sample @ self.w))(x)


class Complex(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(c, dtype=torch.complex128))
        self.index = nn.Parameter(torch.arange(c).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).abs()[..., self.index]


class HookedGradients(Lin):
    """Hooks on a parameter's, an activation's and a module's gradients."""

    def __init__(self, c: int) -> None:
        super().__init__(c)
        self.lin.weight.register_hook(lambda g: g * 0.5)
        self.lin.register_full_backward_hook(lambda module, into, out: (into[0] * 2,) if into[0] is not None else None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.7)
        return x + h


class Pairs(nn.Module):
    """Two streams from child to child."""

    class Pair(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.lin = nn.Linear(c, c)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            a, b = pair
            return b, a + self.lin(b).tanh()

    def __init__(self, c: int) -> None:
        super().__init__()
        self.pairs = nn.Sequential(self.Pair(c), self.Pair(c))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.pairs((x, x.cos()))
        return a + b


class Written(Lin):
    """A parameter that its forward writes."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.lin.weight.clamp_(-0.3, 0.3)
        return x + self.lin(x)


class Remembers(Lin):
    """A child in a list that torch does not know."""

    def __init__(self, c: int) -> None:
        super().__init__(c)
        self.hidden = [self.lin.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.hidden[0]


class ReentrantCheckpoint(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(c, c), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True) if x.requires_grad else self.inner(x)


class Grouped(nn.Module):
    """Norms without running statistics, over channels."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.group, self.instance = nn.GroupNorm(1, c), nn.InstanceNorm1d(c, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.instance(self.group(x.transpose(1, 2))).transpose(1, 2)


class Functions(Weight):
    """``torch.func.grad`` in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda z: (z * self.w).sin().sum())(x)


class Autocast(Lin):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x + self.lin(x)
