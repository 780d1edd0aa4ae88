"""What links cost, measured: a dear link is found, nothing of the model changes, all ranks get the same numbers."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import engine_cases as cases
import pytest
import torch
from torch import nn

from plait.comm import Comm, run
from plait.run.config.settings import VerifyConfig
from plait.run.job.block_costs import Seconds, agreed_block_costs, block_costs
from plait.run.job.job import make_job
from plait.table.mesh import Mesh


def model() -> nn.Sequential:
    """The third link is some hundred times as dear as the others."""
    wide = nn.Sequential(nn.Linear(5, 3000), nn.Tanh(), nn.Linear(3000, 5))
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), wide, nn.Linear(5, 3)).double()


def batch() -> cases.Batch:
    return {"x": torch.ones(64, 5, dtype=torch.float64), "mask": torch.ones(64, dtype=torch.float64)}


def test_the_dear_link_is_found_and_the_model_left_alone() -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    forward, backward = zip(*block_costs(net, cases.loss_sum, batch(), 64), strict=True)
    assert len(forward) == len(backward) == 4 and min(*forward, *backward) > 0
    assert forward[2] == max(forward) and backward[2] == max(backward)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    net(batch()["x"])  # no hook is left behind


def test_links_are_measured_as_they_will_run() -> None:
    """Blocks run a second time in the backward."""
    calls = Counter[str]()

    class Counted(cases.Block):
        def forward(self, x_BC: torch.Tensor) -> torch.Tensor:
            calls["block"] += 1
            return super().forward(x_BC)

    net = cases.distinct(nn.Sequential(nn.Linear(5, 5), Counted(), nn.Linear(5, 3)))
    usual = list(block_costs(net, cases.loss_sum, batch(), 64, repeats=1))
    assert len(usual) == 3 and calls == {"block": 2}
    calls.clear()
    assert len(list(block_costs(net, cases.loss_sum, batch(), 64, repeats=1, recompute="full"))) == 3
    assert calls == {"block": 4}


def test_a_run_measures_its_links_as_it_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def costs(*args: Any, **settings: Any) -> Seconds:
        asked.update(settings)
        return (1.0,) * 4, (1.0,) * 4

    monkeypatch.setattr("plait.run.job.job.agreed_block_costs", costs)
    config = VerifyConfig(mesh="pipe=2", split="measured", layers=1, recompute="full", microbatches=2)
    (layout,) = run(Mesh(), lambda comm: config.measured(make_job(config.task, config.dtypes), comm))
    assert asked == {"recompute": "full"} and sum(layout.split or ()) == 4


def test_all_ranks_agree() -> None:
    template = model()

    def body(comm: Comm) -> object:
        return agreed_block_costs(copy.deepcopy(template), comm, cases.loss_sum, batch(), 64, recompute="full")

    first, *others = run(Mesh(pipe=3), body, deadline=20)
    assert others == [first] * 2
