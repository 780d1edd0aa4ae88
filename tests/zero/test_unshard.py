"""A unit is gathered when its parameters are read and freed after the last read, not earlier.

Each model here reads parameters at a moment that a simple rule gets wrong: after the last trained gradient of the
unit (frozen weights, borrowed weights), in a second call, or between a backward and the step.
"""

from __future__ import annotations

import re
from pathlib import Path

import engine_cases as cases
import pytest
import torch
from engine_cases import SPLIT_ROWS, agree, batches, distinct, plain, sgd, train
from torch import Tensor, nn

import plait

WIDTH = cases.WIDTH


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class FrozenFirst(nn.Module):
    """Trained after frozen: all gradients of the unit have come while its frozen weight is still needed."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.own = frozen(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.own(self.base(x_BC).tanh())


class Sharing(nn.Module):
    """Blocks that read one shared linear before their own."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.own(self.shared(x_BC).tanh())


class FrozenTwice(nn.Module):
    """A frozen module in the middle, called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), frozen(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.last(self.middle(self.middle(self.first(x_BC))).tanh())


class BoundaryState(nn.Module):
    """Learned latents (a leaf) attend to a memory through a frozen module of two inputs."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query = frozen(nn.Linear(WIDTH, WIDTH)), frozen(nn.Linear(WIDTH, WIDTH))

        def forward(self, latent_C: Tensor, memory_BC: Tensor) -> Tensor:
            key = self.key(memory_BC)
            return self.query(latent_C) * key.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(WIDTH))
        self.memory = nn.Linear(WIDTH, WIDTH)
        self.cross = nn.ModuleList([self.Cross()])

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.cross[0](self.latent, self.memory(x_BC))


class FrozenBetween(nn.Module):
    """A frozen scale, read before the model's own trained weight: its backward comes after that weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.turn = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x_BC: Tensor) -> Tensor:
        return (self.first(x_BC) * self.scale) @ self.turn


def sharing() -> nn.Module:
    shared = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*(Sharing(shared) for _ in range(3)))


MODELS = {
    "frozen before own": lambda: nn.Sequential(FrozenFirst(), FrozenFirst()),
    "shared before own": sharing,
    "frozen, twice": FrozenTwice,
    "frozen, two inputs": BoundaryState,
    "frozen in the model itself": FrozenBetween,
}


@pytest.mark.parametrize("row", ["ddp", *SPLIT_ROWS])
@pytest.mark.parametrize("model", MODELS)
def test_frozen_and_shared_parameters_stay_until_they_were_read(model: str, row: str) -> None:
    template, data = distinct(MODELS[model]()), batches()
    ranks = train(template, "replica=2 shard=2", row, data, optimizer=sgd, microbatches=2)
    agree(ranks, plain(template, data, optimizer=sgd))
    still = {name for name, p in template.named_parameters() if not p.requires_grad}
    assert all(torch.equal(ranks[0].state[name], template.state_dict()[name]) for name in still)


class Biased(nn.Module):
    """A block that calls a module outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BC: Tensor, bias: nn.Module) -> Tensor:
        return self.own(x_BC + bias(x_BC)).tanh()


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Biased() for _ in range(3))

    def forward(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = x_BC + block(x_BC, self.bias)
        return x_BC


@pytest.mark.parametrize(
    ("row", "prefetch", "recompute"),
    [("zero3", 0, None), ("zero3", 1, "full"), ("psdp", 1, None), ("psdp", 0, "full"), ("hsdp", 1, None)],
)
def test_a_module_beside_the_blocks_that_each_of_them_calls(row: str, prefetch: int, recompute: str | None) -> None:
    """The block is open while the module runs, though it is not around it."""
    template = distinct(Beside())
    ranks = train(template, "replica=2 shard=2", row, batches(), prefetch=prefetch, recompute=recompute)
    agree(ranks, plain(template, batches()))


def test_only_the_unsharding_writes_its_fields() -> None:
    """Stages and engines report each start to it; the consequences are in one file."""
    written = re.compile(r"(gathering|unsharding)\.\w+ *([-+]?=)[^=]")
    sources = Path(plait.__file__).parent.rglob("*.py")
    assert not [f"{path.name}: {found[0]}" for path in sources if (found := written.search(path.read_text()))]
