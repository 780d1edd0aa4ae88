"""Jobs unlike most: complex weights, draws of all kinds, forwards that share an autocast, packed sequences."""

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


class Packed(nn.Module):
    """Means over sequences that are packed into one row of tokens; ``ends`` are where each begins, and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        sequence = torch.bucketize(torch.arange(len(tokens)), ends, right=True)
        same = (sequence[:, None] == sequence[None, :]).float()
        out: Tensor = self.out(same @ self.embed(tokens) / same.sum(1, keepdim=True))
        return out


def test_packed_sequences_that_are_cut_as_samples_are_named() -> None:
    def packed(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        tokens, labels = (torch.randint(3, (24,), generator=generator) for _ in range(2))
        return {"tokens": tokens, "cu_seqlens": torch.tensor([0, 5, 11, 17, 24]), "labels": labels}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["tokens"], batch["cu_seqlens"]), batch["labels"], reduction="sum")

    verdict = plait.verify(replace(JOB, build=Packed, loss_fn=loss, batches=packed), mesh="shard=2", microbatches=2)
    assert verdict.word == "different"
    assert "['cu_seqlens'] of the batch has the offsets of packed sequences" in str(verdict.first), verdict
