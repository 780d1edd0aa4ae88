"""Units that return their own parameters, or outputs that the model writes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edge_cases import (
    EVERY,
    MESHES,
    alone,
    data_for,
    on_ranks,
    same,
)
from engine_cases import batches, count, loss_sum
from torch import Tensor, nn


class Latents(nn.Module):
    """Learned queries, as in Perceiver: the unit's output is its own parameter, seen from another side."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.queries, self.how = nn.Parameter(torch.randn(3, 5).double()), how

    def forward(self, size: int) -> Any:
        if self.how == "expanded":
            return self.queries.expand(size, -1, -1)
        if self.how == "in a dict":
            return {"queries": (self.queries[None], size)}
        return {"itself": self.queries, "detached": self.queries.detach(), "transposed": self.queries.t().t()}[self.how]


class Perceiver(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.latents, self.how = Latents(how), how
        self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        queries = self.latents(len(x))
        if self.how == "in a dict":
            queries = queries["queries"][0]
        out: Tensor = self.second((torch.tanh(self.first(x)[:, None] * queries) + queries.square()).sum(1))
        return out


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", ["itself", "expanded", "detached", "transposed", "in a dict"])
def test_a_unit_returns_its_own_parameter(row: str, mesh: str, how: str) -> None:
    torch.manual_seed(0)
    template = Perceiver(how)
    if row.endswith("bf16"):
        template = template.float()
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            engine.backward(0.01 * (loss_sum(model, batch)), count(batch))
            optimizer.step()

    _, truth = alone(program, template)
    for _, state in on_ranks(program, template, mesh, row):
        assert same(state, truth, row)


@pytest.mark.parametrize("row", EVERY)
def test_an_output_that_is_written_to_in_place(row: str) -> None:
    """``nn.Linear`` returns a view where its input has three dims; writing to it makes autograd redraw its history."""

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x[:, None].repeat(1, 3, 1))
            hidden[:, 0] = 0
            return self.second(torch.tanh(hidden)).sum(1)

    template = Masking().float() if row.endswith("bf16") else Masking()
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            engine.backward(0.01 * loss_sum(model, batch), count(batch))
            optimizer.step()

    _, truth = alone(program, template)
    for _, state in on_ranks(program, template, "shard=2", row):
        assert same(state, truth, row)
