"""Where one microbatch comes and nothing is reduced, autograd's gradients are the sums; no bit depends on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor, nn

import plait
from plait.zero import adopted
from plait.zero.adopted import AdoptedGradient


class Net(nn.Module):
    """Parameters whose gradients are views of one tensor, a layer that is not used, and two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(6, 1)), nn.Parameter(torch.ones(2, 3))
        self.unused = nn.Linear(3, 3)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) * (self.a.view(6) + self.b.view(6)) ** 2
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().sum()


def trained(mesh: str, sizes: list[int], own_loop: bool, **settings: Any) -> list[tuple[list[Tensor], set[str]]]:
    """Each rank's parameters after a few steps, and the parameters whose gradient was adopted in the last one."""

    torch.manual_seed(0)
    models = [Net()]
    models += [copy.deepcopy(models[0])]
    data = [[torch.randn(3, 6) for _ in range(count)] for count in sizes]

    def body(comm: plait.Comm) -> tuple[list[Tensor], set[str]]:
        model = models[comm.rank]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = plait.Engine(
            model, comm, optimizer=optimizer, loss_fn=loss, count_fn=len, clip=0.1, bucket=0, **settings
        )
        for batches in data:
            if own_loop:
                for batch in batches:
                    engine.backward(loss(model, batch), len(batch))
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.step(batches)
        flats = [g for g in engine.placed.stages[0].gradients.flats if isinstance(g, AdoptedGradient) and g.adopting]
        return [o.view.detach().clone() for o in engine.placed.owned], {name for g in flats for name in g.adopted}

    return plait.run_threads(mesh, body, deadline=20)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 3, 1], [2, 2]])
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [("shard=1", {"strategy": "zero3"}), ("shard=1", {"strategy": "ddp", "nonfinite": "skip"}), ("shard=2", {})],
)
def test_no_bit_depends_on_it(
    monkeypatch: MonkeyPatch, mesh: str, settings: dict[str, Any], sizes: list[int], own_loop: bool
) -> None:
    copied = trained(mesh, sizes, own_loop, **settings)
    monkeypatch.setattr(adopted, "LEAST", 0)
    found = trained(mesh, sizes, own_loop, **settings)
    for (values, names), (right, none) in zip(found, copied, strict=True):
        assert all(map(torch.equal, values, right)) and not none
        layers = ["unused", "layers.0", "layers.2"] if max(sizes) == 1 else ["unused"]
        alone = {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}
        assert names == (alone if mesh == "shard=1" else set())


def test_a_gradient_that_is_not_finite_is_named_and_forgotten(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(adopted, "LEAST", 0)

    def body(comm: plait.Comm) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = plait.Engine(model, comm, optimizer=optimizer)
        before = model.weight.detach().clone()
        poison: Callable[[Tensor], Tensor] = lambda gradient: gradient * float("nan")  # noqa: E731
        handle = model.weight.register_hook(poison)
        engine.backward(model(torch.ones(1, 3)).sum(), 2, "sum")
        with pytest.raises(FloatingPointError, match="gradient in the unit of 'weight' in microbatch 0"):
            optimizer.step()
        handle.remove()
        assert torch.equal(model.weight, before)
        engine.backward(model(torch.ones(1, 3)).sum(), 2, "sum")
        optimizer.step()
        assert model.weight.isfinite().all() and not torch.equal(model.weight, before)

    plait.run_threads("shard=1", body, deadline=20)
