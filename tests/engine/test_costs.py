"""What links cost, measured: a dear link is found, nothing of the model changes, all ranks get the same numbers."""

from __future__ import annotations

import copy

import engine_cases as cases
import torch
from torch import nn

from plait.comm import Comm, run
from plait.core.mesh import Mesh
from plait.engine.costs import agreed_costs, link_costs


def model() -> nn.Sequential:
    """The third link is some hundred times as dear as the others."""
    wide = nn.Sequential(nn.Linear(5, 3000), nn.Tanh(), nn.Linear(3000, 5))
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), wide, nn.Linear(5, 3)).double()


def batch() -> cases.Batch:
    return {"x": torch.ones(64, 5, dtype=torch.float64), "mask": torch.ones(64, dtype=torch.float64)}


def test_the_dear_link_is_found_and_the_model_left_alone() -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    forward, backward = zip(*link_costs(net, cases.loss_sum, batch(), 64), strict=True)
    assert len(forward) == len(backward) == 4 and min(*forward, *backward) > 0
    assert forward[2] == max(forward) and backward[2] == max(backward)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    net(batch()["x"])  # no hook is left behind


def test_all_ranks_agree() -> None:
    template = model()

    def body(comm: Comm) -> object:
        return agreed_costs(copy.deepcopy(template), comm, cases.loss_sum, batch(), 64)

    first, *others = run(Mesh(pipe=3), body, deadline=20)
    assert others == [first] * 2
