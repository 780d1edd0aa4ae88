"""The optimizer and the learning rate of a config are torch's own, under any layout."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from plait.run.job.config import JobConfig
from plait.run.job.job import build_model
from plait.run.job.optimizer import lr_factor, make_optimizer, make_scheduler


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
