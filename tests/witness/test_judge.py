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
@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw"}, {"clip": 0.05}, {"told": True}], ids=str)
def test_a_right_loop_is_the_run_of_a_single_process(
    tmp_path: Path, ranks: int, calls: int, settings: dict[str, Any]
) -> None:
    run(tmp_path / "w", ranks=ranks, calls=calls, **settings)
    found = judge(the_job(settings.get("optimizer", "sgd")), tmp_path / "w", clip=settings.get("clip"))
    assert found.equal and found.residual < 1e-5, found


def test_in_double_precision_it_is_held_tighter(tmp_path: Path) -> None:
    run(tmp_path / "w", dtype=torch.float64, calls=2)
    found = judge(the_job(dtype="fp64"), tmp_path / "w")
    assert found.equal and found.residual < 1e-13, found


FAULTS = [
    ("mean of means", {"calls": 2}, 0, "gradient", None, "means of forwards of different counts are averaged"),
    ("local count", {"calls": 2}, 0, "gradient", None, "each rank divides by its own count"),
    ("local count", {"ranks": 3}, 0, "gradient", None, "means of ranks of different counts"),
    ("not divided", {"calls": 3}, 0, "gradient", 3.0, "not divided by the 3 forwards"),
    ("not divided", {"calls": 2, "ranks": 3}, 0, "gradient", 2.0, "not divided by the 2 forwards"),
    ("sum", {}, 0, "gradient", 18.0, "the sum of the losses is not divided by its count, 18"),
    ("no all-reduce", {}, 0, "gradient", 2.0, "no all-reduce"),
    ("no all-reduce", {"ranks": 3, "calls": 2}, 0, "gradient", 3.0, "no all-reduce"),
    ("last forward", {"calls": 2}, 0, "gradient", 1.0, "gradients are overwritten"),
    ("no zero_grad", {}, 1, "gradient", 1.0, "zero_grad is left out"),
    ("no zero_grad", {"calls": 2, "ranks": 3}, 1, "gradient", 1.0, "zero_grad is left out"),
    ("clip first", {"clip": 0.05}, 0, "gradient", None, "each rank clips its own gradient before they are summed"),
    ("no clip", {"clip": None, "judged": 0.05}, 0, "gradient", None, "it is not clipped"),
    (
        "norm of all ranks",
        {"clip": 0.05, "ranks": 3},
        0,
        "gradient",
        1 / 3,
        "norm that it is clipped by is added up",
    ),
    ("squares of all ranks", {"clip": 0.05}, 0, "gradient", 0.5**0.5, "the squares of the norm that it is clipped by"),
    ("", {"clip": 0.05, "judged": None}, 0, "gradient", None, "judge it with --clip 0.05"),
    ("missing rank", {}, 0, "gradient", 0.5, "divided by the 2 ranks once too often"),
    ("no gradient", {"ranks": 3}, 0, "gradient", 0.0, "never computed, or never sent"),
    ("not finite", {}, 0, "gradient", None, "another computation than the job's"),
    ("no step", {}, 1, "update", 0.0, "the optimizer's step was left out"),
    ("no step", {"steps": 2}, 1, "update", 0.0, "the optimizer's step was left out"),
    ("two steps", {}, 1, "update", 2.0, "applied twice"),
    ("one rank's two steps", {"ranks": 3}, 1, "update", 2.0, "applied twice"),
    ("twice by hand", {}, 1, "update", 2.0, "applied twice"),
    ("twice by hand", {"steps": 2, "optimizer": "adamw"}, 1, "update", 2.0, "applied twice"),
    ("no sampler", {}, 0, "inputs", 0.0, "the sampler does not cut the data by rank"),
    ("drop_last", {}, 0, "inputs", 0.0, "drop_last"),
    ("ahead", {}, 1, "inputs", None, "its data is 1 step ahead"),
    ("left out", {}, 0, "options", 0.0, "no optimizer has it"),
    ("rate", {}, 1, "options", 0.5, "another schedule"),
    ("own weights", {}, 0, "initial", None, "each rank made its own weights"),
    ("lost weights", {}, 0, "initial", None, "each rank made its own weights"),
    ("told", {"told": True}, 0, "loss", 3.0, "the loss that is reported"),
]


@pytest.mark.parametrize(("fault", "settings", "step", "phase", "factor", "cause"), FAULTS)
def test_a_wrong_loop_is_named(
    tmp_path: Path, fault: str, settings: dict[str, Any], step: int, phase: str, factor: float | None, cause: str
) -> None:
    settings = dict(settings)
    judged = settings.pop("judged", settings.get("clip"))
    run(tmp_path / "w", fault, **settings)
    found = judge(the_job(settings.get("optimizer", "sgd")), tmp_path / "w", clip=judged)
    assert (found.step, found.phase) == (step, phase), found
    assert cause in found.cause and found.cause in found.text, found
    if factor is not None:
        assert found.factor == pytest.approx(factor, rel=1e-2), found


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
