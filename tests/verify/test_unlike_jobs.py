"""Jobs unlike most: complex weights, draws of all kinds, forwards that share an autocast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_own_job import JOB
from torch import Tensor, nn

import plait


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_weights_are_bitwise(dtype: torch.dtype) -> None:
    def numbers(step: int) -> Tensor:
        return torch.randn(12, 3, generator=torch.Generator().manual_seed(step), dtype=dtype)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = (model(batch) - batch[:, :2]).abs().square().sum()
        return value

    job = plait.UserJob(lambda: nn.Linear(3, 2, dtype=dtype), loss, numbers, optimizer=JOB.optimizer)
    settings: dict[str, Any] = {"dtype": "fp64"} if dtype == torch.complex128 else {}
    for strategy, mesh in (("ddp", "shard=1"), ("zero3", "shard=2")):
        verdict = plait.verify(job, mesh=mesh, strategy=strategy, microbatches=2, clip=0.1, spread=2, **settings)
        assert verdict.word == "bitwise", verdict


class Drawing(nn.Module):
    """A model whose forward draws random numbers between two layers."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(7, 6), nn.Linear(6, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.draw(self.up(x)))
        return out


def without_grad(h: Tensor) -> Tensor:
    with torch.no_grad():
        noise = torch.randn_like(h) * F.dropout(torch.ones_like(h), 0.5)
    return h + noise


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: F.gumbel_softmax(h, hard=True),
        lambda h: F.gumbel_softmax(h) + F.gumbel_softmax(h, tau=0.5),
        lambda h: h * torch.distributions.Bernoulli(probs=torch.full_like(h, 0.7)).sample(),
        without_grad,
    ],
    ids=["hard gumbel", "two gumbels", "Bernoulli.sample", "no_grad"],
)
def test_the_plain_run_serves_the_draws_that_the_engine_serves(draw: Any) -> None:
    job = replace(JOB, build=lambda: Drawing(draw))
    for strategy, mesh in (("ddp", "shard=1"), ("zero3", "shard=2")):
        verdict = plait.verify(job, mesh=mesh, strategy=strategy, microbatches=2, steps=2)
        assert verdict.word == "bitwise", verdict


def test_two_forwards_under_one_autocast_are_bitwise_though_threads_share_its_casts() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            one, other = model(batch[:, :8]), model(batch[:, 8:])
        value: Tensor = (one.float() - 1).square().sum() + (one.float() * other.float()).sum()
        return value

    def numbers(step: int) -> Tensor:
        return torch.randn(24, 16, generator=torch.Generator().manual_seed(step))

    job = replace(JOB, build=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), loss_fn=loss, batches=numbers)
    for strategy in ("ddp", "zero3"):
        verdict = plait.verify(job, mesh="shard=4", strategy=strategy, microbatches=2, steps=2, locate=False)
        assert verdict.word == "bitwise", verdict
    assert torch.is_autocast_cache_enabled()
