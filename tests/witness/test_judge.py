"""Right loops are the run of a single process; wrong ones are named: what, where, by which factor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loops import run, run_cut, the_job

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
