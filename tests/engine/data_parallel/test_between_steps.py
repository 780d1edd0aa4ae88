"""What optimizers, and others around them, do to parameters between two steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from plait.comm import Comm, run
from plait.core.cells import TABLE
from plait.core.mesh import Mesh
from plait.engine import Engine


class TwoModes(torch.optim.SGD):
    """As schedule-free optimizers: parameters are others while the model is evaluated."""

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(2)

    @torch.no_grad()
    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.div_(2)


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3", "bf16"])
def test_parameters_that_an_optimizer_changes_between_steps(row: str) -> None:
    strategy = TABLE["zero3"].mixed("bf16") if row == "bf16" else TABLE[row]
    template = nn.Linear(5, 3)

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        optimizer = TwoModes(model.parameters(), lr=0.1)
        engine = Engine(model, comm, strategy=strategy, optimizer=optimizer)
        optimizer.eval()
        state = engine.full_state_dict()
        assert state is not None
        return state["weight"]

    if row in ("ddp", "zero3"):
        assert all(torch.equal(weight, 2 * template.weight) for weight in run(Mesh(shard=2), body))
    else:
        with pytest.raises(ValueError, match=r"TwoModes changes parameters between steps, in train\(\) and eval\(\)"):
            run(Mesh(shard=2), body)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_gradients_are_there_behind_the_step(row: str) -> None:
    """An optimizer around another one (Lookahead) asks which parameters had one."""

    def body(comm: Comm) -> list[bool]:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, seed=1)
        engine.backward(model(torch.ones(2, 5)).sum(), 2)
        optimizer.step()
        return [p.grad is not None for p in optimizer.param_groups[0]["params"]]

    assert run(Mesh(), body)[0] and all(all(of_rank) for of_rank in run(Mesh(), body))
