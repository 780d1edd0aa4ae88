"""A run that is saved and taken up is the run that was never stopped, dropout and loss scale too."""

from __future__ import annotations

import copy
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, count, deal, loss_sum, sgd
from loop_cases import ALONE, LAYOUTS, layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh
from plait.table.precision import LossScale


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop = cases.Block(), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.block(x))
        return out


def template() -> nn.Module:
    return cases.distinct(nn.Sequential(*(Dropping() for _ in range(4))))


def build(comm: Comm, row: str, make: Any = adamw, **settings: Any) -> Engine:
    model = template()
    return Engine(
        model, comm, strategy=row, optimizer=make(model.parameters()), loss_fn=loss_sum, count_fn=count, **settings
    )


def steps(engine: Engine, comm: Comm, data: list[cases.Batch]) -> list[float]:
    return [engine.step(deal(batch, comm.mesh, comm.rank, 2)).loss for batch in data]


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("where", LAYOUTS)
def test_a_run_that_is_taken_up_is_the_run_that_goes_on(where: str, make: Any) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        first = build(comm, row, make)
        losses = steps(first, comm, batches(2))
        saved = copy.deepcopy((first.full_state_dict(), first.optimizer_state_dict(), first.step_state()))
        losses += steps(first, comm, batches(5)[2:])
        second = build(comm, row, make)
        second.load_full_state_dict(saved[0])
        second.load_optimizer_state_dict(saved[1])
        second.load_step_state(saved[2])
        assert second.steps == 2
        again = steps(second, comm, batches(5)[2:])
        return losses, again, first.full_state_dict(), second.full_state_dict()

    for losses, again, straight, resumed in run(mesh, body, deadline=20):
        assert again == losses[2:]
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize("make", [adamw, sgd, torch.optim.Adagrad])
@pytest.mark.parametrize("where", LAYOUTS)
def test_without_the_step_it_is_refused(where: str, make: Any) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> None:
        first = build(comm, row, make)
        steps(first, comm, batches(2))
        second = build(comm, row, make)
        second.load_full_state_dict(first.full_state_dict())
        second.load_optimizer_state_dict(first.optimizer_state_dict())
        steps(second, comm, batches(1))

    with pytest.raises(ValueError, match=r"begins at step 0, .*engine\.load_step_state"):
        run(mesh, body, deadline=20)


@pytest.mark.parametrize("where", ALONE)
def test_in_a_loop_of_ones_own_too(where: str) -> None:
    mesh, row = layout(where)

    def looped(engine: Engine, comm: Comm, data: list[cases.Batch]) -> list[float]:
        losses = []
        for batch in data:
            for part in deal(batch, comm.mesh, comm.rank, 2):
                engine.backward(loss_sum(engine.model, part), count(part))
            assert engine.optimizer is not None
            engine.optimizer.step()
            losses.append(engine.last.loss)
        return losses

    def body(comm: Comm) -> Any:
        first, second, third = (build(comm, row) for _ in range(3))
        looped(first, comm, batches(2))
        state = first.full_state_dict()
        for engine in (second, third):
            engine.load_full_state_dict(state)
            engine.load_optimizer_state_dict(first.optimizer_state_dict())
        second.load_step_state(first.step_state())
        assert looped(second, comm, batches(4)[2:]) == looped(first, comm, batches(4)[2:])
        with pytest.raises(ValueError, match=r"engine\.load_step_state"):
            looped(third, comm, batches(1))

    run(mesh, body, deadline=20)


def test_weights_alone_begin_a_new_run() -> None:
    """Fine-tuning: there is no step to go on from."""

    def body(comm: Comm) -> None:
        first = build(comm, "zero3")
        steps(first, comm, batches(2))
        second = build(comm, "zero3")
        second.load_full_state_dict(first.full_state_dict())
        steps(second, comm, batches(1))

    run(Mesh(shard=2), body, deadline=20)


def test_the_loss_scale_goes_on_too() -> None:
    def body(comm: Comm) -> Any:
        first = build(comm, "ddp", loss_scale=LossScale(8.0, interval=2))
        steps(first, comm, batches(3))
        second = build(comm, "ddp", loss_scale=LossScale(8.0, interval=2))
        second.load_step_state(first.step_state())
        return first.gradients.loss_scale, second.gradients.loss_scale

    for first, second in run(Mesh(shard=2), body, deadline=20):
        assert first == second and (first.scale, first.good) == (16.0, 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"seed": 3}, "saved with seed 0, and the engine has seed 3"),
        ({"loss_scale": LossScale(4.0)}, "loss scale None"),
    ],
)
def test_another_seed_or_loss_scale_is_refused(settings: dict[str, Any], text: str) -> None:
    def body(comm: Comm) -> None:
        build(comm, "ddp", **settings).load_step_state(build(comm, "ddp").step_state())

    with pytest.raises(ValueError, match=text):
        run(Mesh(), body)


def test_ranks_at_different_steps_are_told() -> None:
    def body(comm: Comm) -> None:
        engine = build(comm, "ddp")
        engine.load_step_state({"step": comm.rank * 7, "seed": 0, "loss_scale": None})
        steps(engine, comm, batches(1))

    with pytest.raises(ValueError, match=r"the number of steps made is 0 on rank 0, 7 on rank 1"):
        run(Mesh(shard=2), body, deadline=20)
