"""A loop around a BatchNorm: equal in one call, and called by name where its samples were cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.referee.witness.judgement import Judgement

SAMPLES = 8


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def images(step: int) -> Tensor:
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(step))


def loss_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().sum()


def judged(folder: Path, norm: type[nn.Module], sizes: list[int], scale: float = 1.0) -> Judgement:
    """What is said of one process that cuts a step's batch in calls of such sizes."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), norm(6), nn.Tanh(), nn.Linear(6, 5))

    job = plait.UserJob(build, loss_sum, images, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with plait.witness(model, optimizer, folder):
        for step in range(2):
            for part in images(step).split(sizes):
                (loss_sum(model, part) * scale / SAMPLES).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return plait.judge(job, folder)


@pytest.mark.parametrize(("norm", "sizes"), [(nn.BatchNorm1d, [8]), (Frozen, [5, 3]), (nn.LayerNorm, [5, 3])])
def test_it_is_the_run_of_a_single_process(tmp_path: Path, norm: type[nn.Module], sizes: list[int]) -> None:
    found = judged(tmp_path / "w", norm, sizes)
    assert found.equal, found


@pytest.mark.parametrize("seed", [0, 11, 64])
def test_parts_of_a_batch_are_another_function(tmp_path: Path, seed: int) -> None:
    """With some weights the gradient of the bias before it, which is nothing but rounding, is 4 times another one's."""
    torch.manual_seed(seed)
    found = judged(tmp_path / "w", nn.BatchNorm1d, [5, 3])
    assert found.phase == "gradient" and found.step == 0 and not found.equal
    assert "BatchNorm (1) normalises over the samples of each forward, 3 to 5 of the step's 8" in found.text, found
    assert "SyncBatchNorm" not in found.text, found


def test_another_fault_is_not_laid_on_it(tmp_path: Path) -> None:
    assert "normalises" not in judged(tmp_path / "w", nn.BatchNorm1d, [5, 3], scale=2.0).text
    found = judged(tmp_path / "v", nn.BatchNorm1d, [8], scale=2.0)
    assert found.factor == pytest.approx(2.0) and "normalises" not in found.text, found
