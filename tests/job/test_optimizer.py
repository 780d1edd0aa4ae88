"""The optimizer and the rates of a config are torch's own; a job's file is run as it is written now."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from plait.messages.ended import EndedError
from plait.run.job.config import JobConfig
from plait.run.job.families import _states_of
from plait.run.job.job import build_model
from plait.run.job.optimizer import lr_factor, make_optimizer, make_scheduler
from plait.run.job.user_code import load_name


def rates(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch's SequentialLR warns of itself
def test_the_rates_are_those_of_torchs_chain_of_schedulers(schedule: str, warmup: int) -> None:
    config = replace(JobConfig(), lr=0.4, steps=13, lr_schedule=schedule, warmup=warmup, min_lr=0.25)
    parameter = nn.Parameter(torch.zeros(3))
    ours = SGD([parameter], lr=config.update.lr)
    theirs = SGD([parameter], lr=config.update.lr)
    long = config.samples.steps - warmup
    after: LRScheduler = {
        "constant": lambda: ConstantLR(theirs, factor=1.0),
        "linear": lambda: LinearLR(theirs, 1.0, config.update.min_lr, long),
        "cosine": lambda: CosineAnnealingLR(theirs, long, eta_min=config.update.lr * config.update.min_lr),
    }[schedule]()
    if warmup > 1:
        grow = LinearLR(theirs, 1 / warmup, 1.0, warmup - 1)
        after = SequentialLR(theirs, [grow, after], [warmup])
    elif warmup == 1:  # one step at the full rate, and then the schedule from its beginning
        after = SequentialLR(theirs, [ConstantLR(theirs, factor=1.0), after], [1])
    want = rates(theirs, after, config.samples.steps)
    assert rates(
        ours, make_scheduler(config.update, config.samples.steps, ours), config.samples.steps
    ) == pytest.approx(want, rel=1e-12)
    assert want[warmup] == pytest.approx(config.update.lr)


def test_the_rates_in_numbers() -> None:
    got = [lr_factor(s, schedule="linear", warmup=2, steps=6, min_lr=0.2) for s in range(8)]
    assert got == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert lr_factor(4, schedule="cosine", warmup=0, steps=8, min_lr=0.0) == pytest.approx(0.5)
    assert [lr_factor(s, schedule="cosine", warmup=3, steps=3, min_lr=0.0) for s in range(3)] == [1 / 3, 2 / 3, 1]


def test_matrices_decay_and_vectors_do_not() -> None:
    config = JobConfig(layers=2, width=32, heads=2, kv_heads=1, weight_decay=0.3)
    model = build_model(config)
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = make_optimizer(config.update, model.parameters())
    decays, rest = optimizer.param_groups
    assert (decays["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {names[id(p)] for p in rest["params"]} == {n for n, p in model.named_parameters() if p.dim() == 1}
    assert len(decays["params"]) + len(rest["params"]) == len(names)
    assert any("embed" in names[id(p)] for p in decays["params"])
    one = make_optimizer(replace(config.update, weight_decay=None), model.parameters())
    assert [group["weight_decay"] for group in one.param_groups] == [0.01]  # torch's default, for all


def test_a_file_that_was_edited_within_a_second_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "job.py"
    for value in (1, 2):
        file.write_text(f"number = {value}\n")
        os.utime(file, (1_000_000_000, 1_000_000_000))  # the same second, the same size
        assert load_name(f"{file}:number", "job") == value
    assert not (tmp_path / "__pycache__").exists(), "nothing is left beside the user's file"


def test_a_file_that_ends_the_program_is_no_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(EndedError, match=r"job\.py:2 ended the program in <module> \(SystemExit: 0\)"):
        load_name(f"{tmp_path}/job.py:job", "job")


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3),
        (lambda p: torch.optim.LBFGS(p), 2),
    ],
)
def test_what_an_own_optimizer_keeps_is_seen(make: Any, states: int) -> None:
    """It is predicted, for a user's job too."""
    assert _states_of(make(list(nn.Linear(4, 3).parameters()))) == states
