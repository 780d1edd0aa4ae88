"""Models and losses that take gradients themselves: scores, penalties, forces, slopes that leave as attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5


def gradient(y: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(y, x, **{"create_graph": True, **options})[0]


class Layer(nn.Module):
    """Smooth, with a norm, a view of a weight, a Linear on three dims, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)[:, None])).squeeze(1)
        return x + hidden @ self.down.weight.t() + self.down.bias


class Energy(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale).square()


class Forces(Energy):
    """The model itself returns energy and forces."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        forces = gradient(energy.sum(), x, create_graph=self.training)
        return torch.cat((energy, forces), 1)


class Descending(nn.Module):
    """A block that goes down the slope of an energy of its own, some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x if x.requires_grad else x.requires_grad_()
            x = x - self.gain * gradient(self.energy(x).square().sum(), x)
        return x


class Descent(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Descending() for _ in range(num_blocks)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def masked(values: Tensor, batch: Any) -> Tensor:
    return (values.flatten(1).sum(1) * batch["mask"]).sum()


def leaf(batch: Any) -> Tensor:
    return batch["x"].clone().requires_grad_()


def score(model: nn.Module, batch: Any) -> Tensor:
    return masked((gradient(model(x := leaf(batch)).sum(), x) + batch["x"]).square(), batch)


def penalty(model: nn.Module, batch: Any) -> Tensor:
    """WGAN-GP's: the critic's own loss, and the norm of its gradient at other points."""
    real = masked(model(batch["x"]), batch)
    slope = gradient(model(x := leaf(batch) * 0.5).sum(), x)
    return real + masked((slope.norm(dim=1, keepdim=True) - 1).square(), batch)


def own_slope(model: nn.Module, batch: Any) -> Tensor:
    """At the points of the loss itself (R1)."""
    out = model(x := leaf(batch))
    return masked(out + gradient(out.sum(), x).square().sum(1, keepdim=True), batch)


def constant(model: nn.Module, batch: Any) -> Tensor:
    """Adversarial samples: the gradient is a number, its graph stays for the loss."""
    out = model(x := leaf(batch))
    slope = gradient(out.sum(), x, create_graph=False, retain_graph=True)
    return masked(out, batch) + masked(model(batch["x"] + 0.1 * slope.sign()), batch)


def third(model: nn.Module, batch: Any) -> Tensor:
    first = gradient(model(x := leaf(batch)).sum(), x)
    return masked(gradient(first.square().sum(), x).square(), batch)


def between(model: nn.Module, batch: Any) -> Tensor:
    """Two calls, of different parts of one graph."""
    first, second = leaf(batch), leaf(batch) * 2
    out = model(torch.cat((first, second)))
    slope = gradient(out.sum(), second)
    return masked(gradient(out.square().sum(), first).square() + slope.square(), batch)


def plainly(model: nn.Module, batch: Any) -> Tensor:
    return masked((model(batch["x"]) - 0.1).square(), batch)


class Telling(nn.Module):
    """A block whose own gradient leaves as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        self.slope = gradient(out.square().sum(), x).square().sum(1)
        return x + out


class Tellers(Descent):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Telling() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def told(model: nn.Module, batch: Any) -> Tensor:
    """Nothing but these attributes leads to the blocks."""
    model(batch["x"])
    return (torch.stack([block.slope for block in model.blocks]) * batch["mask"]).sum()


class Tied(Energy):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


class Reused(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.layers[1](x)))


class Checkpointed(Energy):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return self.head(self.first(x) * self.scale).square()


class Equilibrium(nn.Module):
    """A fixed point, whose backward solves for another one by gradients of its own (DEQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 1)

    def towards(self, z: Tensor, x: Tensor) -> Tensor:
        for part in self.parts:
            z = torch.tanh(part(z))
        return 0.3 * z + x

    def forward(self, x: Tensor) -> Tensor:
        z = x
        with torch.no_grad():
            for _ in range(20):
                z = self.towards(z, x)
        z = self.towards(z, x)
        start = z.detach().requires_grad_()
        end = self.towards(start, x)

        def solved(incoming: Tensor) -> Tensor:
            found = incoming
            for _ in range(20):
                found = incoming + gradient(end, start, grad_outputs=found, retain_graph=True, create_graph=False)
            return found

        z.register_hook(solved)
        return self.head(z)


PROGRAMS: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "score": (Energy, score),
    "penalty": (Energy, penalty),
    "own slope": (Energy, own_slope),
    "constant": (Energy, constant),
    "third": (Energy, third),
    "between": (Energy, between),
    "forces": (Forces, plainly),
    "descent": (Descent, plainly),
    "score of a descent": (Descent, score),
    "attributes": (Tellers, told),
}

KINDS: dict[str, tuple[type[nn.Module], Callable[..., Tensor], tuple[str, ...], dict[str, Any]]] = {
    "frozen": (Energy, penalty, ("first", "layers.1"), {}),
    "frozen inside": (Descent, score, ("blocks.1",), {}),
    "tied": (Tied, penalty, (), {}),
    "tied, frozen": (Tied, third, ("layers.0.up.weight",), {}),
    "reused": (Reused, own_slope, (), {}),
    "nested units": (Energy, penalty, (), {"units": ["layers.0", "layers.0.up", "layers.2.norm"]}),
    "one unit": (Energy, third, (), {"units": []}),
    "recomputed": (Energy, penalty, (), {"recompute": "full"}),
    "recomputed inside": (Descent, plainly, (), {"recompute": "full"}),
    "checkpoints": (Checkpointed, penalty, (), {}),
    "equilibrium": (Equilibrium, plainly, (), {}),
    "equilibrium, frozen": (Equilibrium, plainly, ("parts.0",), {}),
    "no prefetch": (Energy, penalty, (), {"prefetch": 0}),
}
