"""A unit that reads a parameter of another one: a table that is never called, a head that is a product with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import ROWS, agree, batches, distinct, plain, train
from torch import Tensor, nn

WIDTH = 5


class Layer(nn.Module):
    """Looks at the relative positions that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = x + self.out(torch.tanh(self.mix(x) @ positions.t()) @ positions)
        return out


class Deberta(nn.Module):
    """The blocks get a table's weight itself; the head is a product with the embedding's (no root parameters)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(WIDTH, WIDTH), nn.Embedding(3, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.positions.weight)
        return F.linear(x, self.embed.weight)


class Detr(nn.Module):
    """The model's own forward reads a table that is never called, and goes on with a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.scale = nn.Embedding(7, WIDTH), nn.Parameter(torch.ones(()))
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.weight[2:].unsqueeze(0)
        for layer in self.layers:
            x = layer(x, queries[0] * self.scale)
        out: Tensor = self.head(x + queries[0, 0])
        return out


KINDS: dict[str, tuple[type[nn.Module], tuple[str, ...], dict[str, Any]]] = {
    "given to blocks": (Deberta, (), {}),
    "given to blocks, frozen": (Deberta, ("positions", "layers.1"), {}),
    "given to blocks, recomputed": (Deberta, (), {"recompute": "full"}),
    "given to blocks, nothing ahead": (Deberta, (), {"prefetch": 0}),
    "never called": (Detr, (), {}),
    "never called, frozen": (Detr, ("queries",), {}),
    "nested units": (Detr, (), {"units": ["queries", "layers.0.mix", "layers.1", "layers.1.out", "head"]}),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "replica=2 shard=2"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_gathered_for_whoever_reads_it(kind: str, mesh: str, row: str) -> None:
    model, frozen, settings = KINDS[kind]
    template, data = distinct(model()), batches(3)
    for name, parameter in template.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    agree(train(template, mesh, row, data, microbatches=2, **settings), plain(template, data))
