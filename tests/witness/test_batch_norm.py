"""A loop around a BatchNorm: equal in one call, and called by name where its samples were cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from judged_cases import WIDTH, judged
from torch import nn


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def net(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), norm(6), nn.Tanh(), nn.Linear(6, WIDTH)).train()


normed = partial(judged, build=partial(net, nn.BatchNorm1d), optimizer=partial(torch.optim.SGD, lr=0.1), steps=2)


@pytest.mark.parametrize(("norm", "sizes"), [(nn.BatchNorm1d, None), (Frozen, [9, 3]), (nn.LayerNorm, [9, 3])])
def test_it_is_the_run_of_a_single_process(tmp_path: Path, norm: type[nn.Module], sizes: list[int] | None) -> None:
    found = normed(tmp_path, build=partial(net, norm), sizes=sizes)
    assert found.equal, found


@pytest.mark.parametrize("seed", [1, 11, 64])
def test_parts_of_a_batch_are_another_function(tmp_path: Path, seed: int) -> None:
    """With some weights the gradient of the bias before it, which is nothing but rounding, is 4 times another one's."""
    found = normed(tmp_path, sizes=[9, 3], seed=seed)
    assert found.phase == "gradient" and found.step == 0 and not found.equal
    assert "BatchNorm (1) normalises over the samples of each forward, 3 to 9 of the step's 12" in found.text, found
    assert "SyncBatchNorm" not in found.text, found


def test_another_fault_is_not_laid_on_it(tmp_path: Path) -> None:
    assert "normalises" not in normed(tmp_path / "cut", sizes=[9, 3], scale=2.0).text
    found = normed(tmp_path / "whole", scale=2.0)
    assert found.factor == pytest.approx(2.0) and "normalises" not in found.text, found
