"""Right loops are the run of a single process; wrong ones are named: what, where, by which factor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from judged_cases import WIDTH, judged
from loops import run, run_cut, the_job
from torch import nn

from plait.referee.witness.judge import judge


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw", "steps": 30}, {"clip": 0.05}, {"told": True}], ids=str)
def test_a_right_loop_is_the_run_of_a_single_process(
    tmp_path: Path, ranks: int, calls: int, settings: dict[str, Any]
) -> None:
    run(tmp_path / "w", ranks=ranks, calls=calls, **settings)
    found = judge(the_job(settings.get("optimizer", "sgd")), tmp_path / "w", clip=settings.get("clip"))
    assert found.equal and found.residual < 1e-5, found
    assert found.text.startswith(f"{settings.get('steps', 3)} steps of "), found
    assert "not judged" not in found.text, found


def test_in_double_precision_it_is_held_tighter(tmp_path: Path) -> None:
    run(tmp_path / "w", dtype=torch.float64, calls=2)
    found = judge(the_job(dtype="fp64"), tmp_path / "w")
    assert found.equal and found.residual < 1e-13, found


def test_clipping_by_the_norm_of_the_own_pieces(tmp_path: Path) -> None:
    run_cut(tmp_path / "right", local_norm=False)
    assert judge(the_job(), tmp_path / "right", clip=0.05).equal
    run_cut(tmp_path / "wrong", local_norm=True)
    found = judge(the_job(), tmp_path / "wrong", clip=0.05)
    assert (found.step, found.phase) == (0, "gradient"), found
    assert "the norm of its own pieces" in found.cause, found


def test_a_killed_run_is_judged_up_to_its_last_whole_step(tmp_path: Path) -> None:
    run(tmp_path / "w", kill=2, steps=4)
    found = judge(the_job(), tmp_path / "w")
    assert found.equal and found.text.startswith("3 steps of 2 ranks"), found
    (tmp_path / "w/rank-00001/step-000002.safetensors").unlink()
    assert judge(the_job(), tmp_path / "w").text.startswith("2 steps")


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
