"""One module under several names, on several stages: the reference sums its gradient stage by stage as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import plait


def twice() -> nn.Module:
    shared = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), shared, nn.Tanh(), shared, nn.Dropout(0.1), nn.Linear(6, 6))


class OneBlock(nn.Module):
    """As ALBERT's layers: the same block four times, behind an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList([block] * 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(13, 6, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("build", [twice, OneBlock])
def test_it_is_bitwise(build: Callable[[], nn.Module], schedule: str) -> None:
    job = plait.UserJob(build, lambda model, b: (model(b[0]) - b[1]).square().sum(), batch)
    verdict = plait.verify(job, mesh="pipe=2", strategy="zero1", microbatches=3, schedule=schedule, steps=2)
    assert verdict.word == "bitwise", verdict
