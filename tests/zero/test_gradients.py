"""Gradients are sums, divided once: every row gives the single process's, for any model."""

from __future__ import annotations

from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import ROWS, Made, agree, batches, distinct, plain, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Odd(nn.Module):
    """Zero-size, scalar, one-element, prime-sized and unused parameters beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.one = nn.Parameter(torch.zeros(1))
        self.prime = nn.Parameter(torch.zeros(17, cases.WIDTH))
        self.unused = nn.Parameter(torch.zeros(7))
        self.back = nn.Linear(17, 3)

    def forward(self, x_BC: Tensor) -> Tensor:
        hidden = x_BC @ self.prime.t() * self.scalar + self.one + self.nothing.sum()
        return self.back(hidden.tanh())


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=3", "replica=2 shard=2"])
def test_odd_sizes_and_a_parameter_that_gets_no_gradient(mesh: str, row: str) -> None:
    """No gradient is not a zero gradient: weight decay would shrink it and moments would come to exist."""
    template = distinct(Odd())
    look = lambda engine: [n for n, kept in engine.optimizer_state_dict()["state"].items() if not kept]  # noqa: E731
    ranks = train(template, mesh, row, batches(), microbatches=2, look=look)
    agree(ranks, plain(template, batches()))
    assert all(record.seen == ["nothing", "unused"] for record in ranks), "torch loads a state that has every name"
    assert all(("unused", 0, 7) not in step for record in ranks for step in record.gradients)


@pytest.mark.parametrize("row", ROWS)
def test_mixed_dtypes(row: str) -> None:
    """In one unit."""
    run = lambda m, x_BC: m.wide(m.narrow(x_BC.float()).tanh().double())  # noqa: E731
    template = distinct(Made(run, narrow=nn.Linear(cases.WIDTH, 9), wide=nn.Linear(9, 3)))
    template.narrow.float()
    ranks = train(template, "shard=3", row, batches(), clip=0.1, units=())
    agree(ranks, plain(template, batches(), clip=0.1), tolerance=1e-5)
    assert len({tuple(record.norms) for record in ranks}) == 1, "the norm is one number on all ranks"


def sparse() -> nn.Module:
    return Made(lambda m, x_BC: m.table((x_BC[:, 0] > 0).long()), table=nn.Embedding(4, 3, sparse=True))


class Reentrant(cases.Net):
    """Checkpoints that run a backward of their own inside the backward: a parameter gets two gradients in it."""

    def through(self, x_BC: Tensor) -> Tensor:
        for _ in range(2):
            x_BC = checkpoint(self.blocks[0], x_BC, use_reentrant=True)
        return x_BC


@pytest.mark.parametrize("row", ["ddp", "zero2"])
@pytest.mark.parametrize(
    ("kind", "words"), [(sparse, r"table\.weight.*sparse=False"), (Reentrant, r"second gradient.*use_reentrant=False")]
)
def test_gradients_that_cannot_be_added_up_are_refused(kind: Any, words: str, row: str) -> None:
    with pytest.raises(ValueError, match=words):
        train(distinct(kind()), "shard=2", row, batches())
