"""Changes that optimizers and other code make to parameters between two steps."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_cases import build
from torch import nn

import plait
from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh


class ScheduleFree(torch.optim.Optimizer):
    """As the official one: it steps in its training mode only, and looks into its state when that begins."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    @torch.no_grad()
    def turn(self, mode: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p] and group["train_mode"] != mode:
                    p.lerp_(self.state[p]["z"], 1 - (group["beta"] if mode else 1 / group["beta"]))
            group["train_mode"] = mode

    def train(self) -> None:
        self.turn(True)

    def eval(self) -> None:
        self.turn(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).sub_(p.grad, alpha=group["lr"] * (1 - group["beta"]))
                z.sub_(p.grad, alpha=group["lr"])


def engine_of(template: nn.Module, comm: Comm, row: str) -> Engine:
    return build(template, comm, strategy=row, optimizer=partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3", "bf16"])
def test_a_schedule_free_optimizer_in_its_modes(row: str) -> None:
    """It is allowed where a rank has one copy of the parameters, and refused elsewhere."""
    x_BC, template = torch.linspace(-1, 1, 12, dtype=torch.float64).sin().view(2, 6), nn.Linear(6, 7)
    template = template if row == "bf16" else template.double()
    strategy = TABLE["zero3"].mixed("bf16") if row == "bf16" else TABLE[row]

    def body(comm: Comm, row: Any = strategy) -> list[Any]:
        model, seen = copy.deepcopy(template), []
        optimizer = plait.elementwise(ScheduleFree(model.parameters()))
        optimizer.train()
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        for _ in range(3):
            mine = x_BC[comm.rank :: comm.mesh.size]
            engine.backward(model(mine).square().sum(), len(mine))
            optimizer.step()
            optimizer.eval()
            seen.append(engine.full_state_dict()["weight"])
            optimizer.train()
        return seen

    if row not in ("ddp", "zero3"):
        with pytest.raises(ValueError, match=r"ScheduleFree changes parameters between steps, in train\(\)"):
            run(Mesh(shard=2), body, deadline=20)
        return
    (truth,) = run(Mesh(), lambda comm: body(comm, "ddp"))
    for seen in run(Mesh(shard=2), body, deadline=20):
        assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(seen, truth, strict=True))


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_gradients_are_there_behind_the_step(row: str) -> None:
    """An optimizer around another one (Lookahead) asks which parameters had one."""

    def body(comm: Comm) -> list[bool]:
        engine = engine_of(nn.Linear(5, 3), comm, row)
        engine.backward(engine.model(torch.ones(2, 5)).sum(), 2)
        engine.optimizer.step()
        return [p.grad is not None for p in engine.optimizer.param_groups[0]["params"]]

    (found,) = run(Mesh(), body)
    assert found and all(found)


@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_hooks_behind_a_step_that_take_the_right_door(row: str) -> None:
    template = nn.Linear(5, 3)

    def body(comm: Comm) -> Any:
        engine = engine_of(template, comm, row)
        model, optimizer = engine.model, engine.optimizer

        def keeps_small(*call: Any) -> None:
            with torch.no_grad(), engine.gathered(modify=True):
                model.weight.clamp_(-0.1, 0.1)

        optimizer.register_step_post_hook(keeps_small)
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(set_to_none=False))
        for _ in range(3):
            engine.backward(model(torch.ones(2, 5)).square().sum(), 2)
            optimizer.step()
        return engine.full_state_dict()

    for state in run(Mesh(shard=2), body, deadline=20):
        assert state["weight"].abs().max() <= 0.1


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_a_step_that_was_bound_before_the_engine(row: str) -> None:
    template, x = nn.Linear(5, 3), torch.ones(2, 5)

    def body(comm: Comm, old: bool) -> Any:
        model = copy.deepcopy(template)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = optimizer.step
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        for _ in range(2):
            engine.backward(model(x + comm.rank).square().sum(), 2)
            update() if old else optimizer.step()
        return engine.full_state_dict()

    states = [state for old in (True, False) for state in run(Mesh(shard=2), partial(body, old=old), deadline=20)]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in state)
