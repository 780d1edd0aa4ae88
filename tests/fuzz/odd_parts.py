"""Forwards as fewer users write them: methods, hooks, transforms, complex numbers, weights that a forward writes."""

from typing import Any

import torch
from parts import PARTS, Residual, ones, part, square
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@part(a=square, b=lambda c: nn.Linear(c, c, bias=False))
def sums(self: Any, x: Tensor) -> Tensor:
    """Reads all its parameters in one loop, before its children run."""
    total = sum(p.square().mean() for p in self.parameters())
    return self.b(self.a(x)) / (1 + total)


class Coder(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(c, c), nn.Parameter(torch.ones(c))

    def encode(self, x: Tensor) -> Tensor:
        return self.up(x)

    def decode(self, x: Tensor) -> Tensor:
        return x * self.down


@part(coder=Coder)
def by_method(self: Any, x: Tensor) -> Tensor:
    """Its child's own method is called, not the child."""
    return x + self.coder.decode(self.coder.encode(x).tanh())


@part(child=square)
def calls_forward(self: Any, x: Tensor) -> Tensor:
    """``child.forward(x)``: no hook runs."""
    return x + self.child.forward(x)


@part(lin=square)
def quantized(self: Any, x: Tensor) -> Tensor:
    """A straight-through estimator on the weight."""
    w = self.lin.weight
    return x + F.linear(x, w + ((w * 8).round() / 8 - w).detach(), self.lin.bias)


@part(lin=square, auxiliary=lambda c: None)
def auxiliary(self: Any, x: Tensor) -> Tensor:
    """Leaves a term of the loss in an attribute, which the loss collects."""
    h = self.lin(x)
    self.auxiliary = 0.01 * h.square().sum()
    return x + h.tanh()


@part(w=lambda c: nn.Parameter(torch.ones(c, c)))
def mapped(self: Any, x: Tensor) -> Tensor:
    """A parameter under vmap."""
    return torch.vmap(lambda sample: sample + torch.tanh(sample @ self.w))(x)


@part(
    w=lambda c: nn.Parameter(torch.ones(c, dtype=torch.complex128)),
    index=lambda c: nn.Parameter(torch.arange(c).flip(0), requires_grad=False),
)
def complex(self: Any, x: Tensor) -> Tensor:
    return (x * self.w).abs()[..., self.index]


def hook(module: Any) -> None:
    module.lin.weight.register_hook(lambda g: g * 0.5)
    module.lin.register_full_backward_hook(lambda module, into, out: (into[0] * 2,) if into[0] is not None else None)


@part(hook, lin=square)
def hooked_gradients(self: Any, x: Tensor) -> Tensor:
    """Hooks on a parameter's, an activation's and a module's gradients."""
    h = self.lin(x)
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.7)
    return x + h


class Pair(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.lin = nn.Linear(c, c)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = pair
        return b, a + self.lin(b).tanh()


@part(pairs=lambda c: nn.Sequential(Pair(c), Pair(c)))
def pairs(self: Any, x: Tensor) -> Tensor:
    """Two streams from child to child."""
    a, b = self.pairs((x, x.cos()))
    return a + b


@part(lin=square)
def written(self: Any, x: Tensor) -> Tensor:
    """A parameter that its forward writes."""
    with torch.no_grad():
        self.lin.weight.clamp_(-0.3, 0.3)
    return x + self.lin(x)


@part(lambda m: setattr(m, "hidden", [m.lin.weight]), lin=square)
def remembers(self: Any, x: Tensor) -> Tensor:
    """A child in a list that torch does not know."""
    return x + x @ self.hidden[0]


@part(inner=lambda c: nn.Sequential(nn.Linear(c, c), nn.Tanh()))
def reentrant(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.inner, x, use_reentrant=True) if x.requires_grad else self.inner(x)


@part(group=lambda c: nn.GroupNorm(1, c), instance=lambda c: nn.InstanceNorm1d(c, affine=True))
def grouped(self: Any, x: Tensor) -> Tensor:
    """Norms without running statistics, over channels."""
    return self.instance(self.group(x.transpose(1, 2))).transpose(1, 2)


@part(w=ones)
def functions(self: Any, x: Tensor) -> Tensor:
    """``torch.func.grad`` in a forward."""
    return x + torch.func.grad(lambda z: (z * self.w).sin().sum())(x)


@part(lin=square)
def autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x + self.lin(x)


PARTS |= {
    "orthogonal": lambda c: torch.nn.utils.parametrizations.orthogonal(nn.Linear(c, c)),
    "old_weight_norm": lambda c: torch.nn.utils.weight_norm(nn.Linear(c, c)),
    "bilinear": lambda c: Residual(nn.Linear(c, 2 * c), nn.GLU(), nn.Tanh()),
}
