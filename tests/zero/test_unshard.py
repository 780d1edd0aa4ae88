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
from engine_cases import SPLIT_ROWS, Made, agree, batches, distinct, plain, sgd, train
from pipeline_cases import linear
from torch import Tensor, nn

import plait

WIDTH = cases.WIDTH


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def frozen_first() -> nn.Module:
    """Trained after frozen: all gradients of the unit have come while its frozen weight is still needed."""
    return Made(lambda m, x: m.own(m.base(x).tanh()), base=frozen(linear()), own=linear())


def sharing() -> nn.Module:
    """Blocks that read one shared linear before their own."""
    shared = linear()
    return nn.Sequential(*(Made(lambda m, x: m.own(m.shared(x).tanh()), shared=shared, own=linear()) for _ in range(3)))


def frozen_twice() -> nn.Module:
    """A frozen module in the middle, called twice in a row."""
    run = lambda m, x: m.last(m.middle(m.middle(m.first(x))).tanh())  # noqa: E731
    return Made(run, first=linear(), middle=frozen(linear()), last=linear())


def two_inputs() -> nn.Module:
    """Learned latents (a leaf) attend to a memory through a frozen module of two inputs."""
    attend = lambda m, latent, memory: m.key(memory).tanh() * m.query(latent)  # noqa: E731
    cross = nn.ModuleList([Made(attend, key=frozen(linear()), query=frozen(linear()))])
    run = lambda m, x: m.cross[0](m.latent, m.memory(x))  # noqa: E731
    return Made(run, latent=nn.Parameter(torch.zeros(WIDTH)), memory=linear(), cross=cross)


def frozen_between() -> nn.Module:
    """A frozen scale, read before the model's own trained weight: its backward comes after that weight's gradient."""
    scale, turn = nn.Parameter(torch.ones(WIDTH), requires_grad=False), nn.Parameter(torch.ones(WIDTH, WIDTH))
    return Made(lambda m, x: (m.first(x) * m.scale) @ m.turn, first=linear(), scale=scale, turn=turn)


MODELS = {
    "frozen before own": lambda: nn.Sequential(frozen_first(), frozen_first()),
    "shared before own": sharing,
    "frozen, twice": frozen_twice,
    "frozen, two inputs": two_inputs,
    "frozen in the model itself": frozen_between,
}


@pytest.mark.parametrize("row", ["ddp", *SPLIT_ROWS])
@pytest.mark.parametrize("model", MODELS)
def test_frozen_and_shared_parameters_stay_until_they_were_read(model: str, row: str) -> None:
    template, data = distinct(MODELS[model]()), batches()
    ranks = train(template, "replica=2 shard=2", row, data, optimizer=sgd, microbatches=2)
    agree(ranks, plain(template, data, optimizer=sgd))
    still = {name for name, p in template.named_parameters() if not p.requires_grad}
    assert all(torch.equal(ranks[0].state[name], template.state_dict()[name]) for name in still)


class Beside(nn.Module):
    """Each block calls a module which stands beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = linear()
        biased = [Made(lambda m, x, bias: m.own(x + bias(x)).tanh(), own=linear()) for _ in range(3)]
        self.blocks = nn.ModuleList(biased)

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
