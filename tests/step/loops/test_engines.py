"""Several engines in one loop: a loss that goes through the models of two, a teacher, a critic."""

from __future__ import annotations

import copy
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches
from loop_cases import ALONE, layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


def generator() -> nn.Module:
    return cases.distinct(nn.Sequential(cases.Block(), nn.Linear(5, 5), cases.Block()), seed=1)


def critic() -> nn.Module:
    return cases.distinct(nn.Sequential(cases.Block(), cases.Block(), nn.Linear(5, 1)), seed=2)


def score(out: Tensor, wanted: float) -> Tensor:
    return (out - wanted).square().sum()


def parts(comm: Comm, steps: int = 3) -> list[Tensor]:
    here = comm.mesh.data_rank(comm.rank)
    return [batch["x"].tensor_split(comm.mesh.data_size)[here] for batch in batches(steps)]


def plain_gan() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    g, d = generator(), critic()
    opt_g, opt_d = adamw(g.parameters()), adamw(d.parameters())
    for batch in batches(3):
        x = batch["x"]
        fake = g(x)
        opt_d.zero_grad()
        ((score(d(x), 1) + score(d(fake.detach()), 0)) / (2 * len(x))).backward()
        opt_d.step()
        opt_g.zero_grad()
        (score(d(fake), 1) / len(x)).backward()
        opt_g.step()
    return g.state_dict(), d.state_dict()


@pytest.mark.parametrize("where", ALONE)
def test_a_generator_and_its_critic(where: str) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        g, d = generator(), critic()
        opt_g, opt_d = adamw(g.parameters()), adamw(d.parameters())
        engine_g = Engine(g, comm, strategy=row, optimizer=opt_g)
        engine_d = Engine(d, comm, strategy=row, optimizer=opt_d)
        for x in parts(comm):
            fake = g(x)
            opt_d.zero_grad()
            engine_d.backward(score(d(x), 1) + score(d(fake.detach()), 0), 2 * len(x))
            opt_d.step()
            opt_g.zero_grad()
            fake = g(x)
            engine_g.backward(score(d(fake), 1), len(x), also=[engine_d])
            opt_g.step()
        return engine_g.full_state_dict(), engine_d.full_state_dict()

    for states in run(mesh, body, deadline=20):
        for state, wanted in zip(states, plain_gan(), strict=True):
            assert all(cases.close(state[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("where", ALONE)
def test_two_models_trained_by_one_loss(where: str) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        g, d = generator(), critic()
        optimizers = adamw(g.parameters()), adamw(d.parameters())
        engines = [Engine(m, comm, strategy=row, optimizer=o) for m, o in zip((g, d), optimizers, strict=True)]
        for x in parts(comm):
            for half in x.tensor_split(2):
                engines[1].backward(score(d(g(half)), 1), len(half), also=engines[:1])
            for optimizer in optimizers:
                optimizer.step()
        return engines[0].full_state_dict(), engines[1].full_state_dict(), engines[0].last.loss, engines[1].last.loss

    g, d = generator(), critic()
    optimizer = adamw([*g.parameters(), *d.parameters()])
    for batch in batches(3):
        loss = score(d(g(batch["x"])), 1) / len(batch["x"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, its, *losses in run(mesh, body, deadline=20):
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-11)
        assert all(cases.close(mine[name], value) for name, value in g.state_dict().items())
        assert all(cases.close(its[name], value) for name, value in d.state_dict().items())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("where", ALONE)
def test_a_student_and_its_teacher(where: str, frozen: bool) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        student, teacher = generator(), copy.deepcopy(generator()).eval().requires_grad_(not frozen)
        optimizer = adamw(student.parameters())
        engine = Engine(student, comm, strategy=row, optimizer=optimizer)
        Engine(teacher, comm, strategy=row)
        for x in parts(comm):
            with torch.no_grad():
                target = teacher(x) * 2
            engine.backward((student(x) - target).square().sum(), x.numel())
            optimizer.step()
        return engine.full_state_dict()

    student, teacher = generator(), generator()
    optimizer = adamw(student.parameters())
    for batch in batches(3):
        (student(batch["x"]) - teacher(batch["x"]).detach() * 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run(mesh, body, deadline=20):
        assert all(cases.close(state[name], value) for name, value in student.state_dict().items())


@pytest.mark.parametrize("where", ALONE)
def test_a_loss_through_a_frozen_model_needs_no_word(where: str) -> None:
    """A perceptual loss: the gradient passes, and the frozen model gets none."""
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        g, d = generator(), critic().requires_grad_(False)
        optimizer = adamw(g.parameters())
        engine = Engine(g, comm, strategy=row, optimizer=optimizer)
        Engine(d, comm, strategy=row)
        for x in parts(comm):
            engine.backward(score(d(g(x)), 1), len(x))
            optimizer.step()
        return engine.full_state_dict()

    g, d = generator(), critic()
    optimizer = adamw(g.parameters())
    for batch in batches(3):
        (score(d(g(batch["x"])), 1) / len(batch["x"])).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run(mesh, body, deadline=20):
        assert all(cases.close(state[name], value) for name, value in g.state_dict().items())


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("where", ALONE)
def test_an_engine_that_is_not_named_is_asked_for(where: str, step: int) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> None:
        g, d = generator(), critic()
        opt_g, opt_d = adamw(g.parameters()), adamw(d.parameters())
        engine_g = Engine(g, comm, strategy=row, optimizer=opt_g)
        engine_d = Engine(d, comm, strategy=row, optimizer=opt_d)
        for number, x in enumerate(parts(comm)):
            engine_d.backward(score(d(x), 1), len(x))
            opt_d.step()
            also = () if number == step else [engine_d]
            engine_g.backward(score(d(g(x)), 1), len(x), also=also)
            opt_g.step()
            opt_d.zero_grad()

    with pytest.raises(ValueError, match=r"came outside of its engine's backward: .*also=\[engine\]"):
        run(mesh, body, deadline=20)


def test_hooks_on_what_is_gone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a frozen model no backward ends, so nothing says when a forward of it is over."""
    monkeypatch.setattr("plait.zero.activation_hooks.MANY", 8)

    def body(comm: Comm) -> int:
        d = critic().requires_grad_(False)
        engine = Engine(d, comm, strategy="zero3")
        for _ in range(50):
            d(torch.ones(2, 5, dtype=torch.float64, requires_grad=True)).sum().backward()
        return sum(map(len, engine.placed.stages[0].unsharding._hooks._handles.values()))

    assert max(run(Mesh(shard=2), body, deadline=20)) <= 16


class WithWeight(nn.Module):
    """A criterion that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, loss: Tensor) -> Tensor:
        return loss * torch.exp(-self.weight) + self.weight


@pytest.mark.parametrize(
    ("mesh", "row", "own"),
    [("shard=1", "ddp", True), ("shard=2", "zero3", True), ("shard=2", "ddp", False), ("pipe=2", "ddp", False)],
)
def test_a_parameter_that_no_engine_has_is_refused(mesh: str, row: str, own: bool) -> None:
    def body(comm: Comm) -> None:
        model, criterion = cases.distinct(nn.Sequential(*(cases.Block() for _ in range(2)))), WithWeight()

        def loss(model: nn.Module, batch: Any) -> Tensor:
            value: Tensor = criterion(cases.loss_sum(model, batch))
            return value

        optimizer = cases.adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=loss, count_fn=cases.count)
        (batch,) = cases.batches(1)
        if own:  # a program that catches it, and goes on, is told again
            with pytest.raises(ValueError, match="that is not the engine's"):
                engine.backward(loss(model, batch), cases.count(batch))
            optimizer.zero_grad()
            engine.backward(loss(model, batch), cases.count(batch))
        else:
            engine.step([batch])

    with pytest.raises(ValueError, match=r"a trainable parameter of shape \(\) that is not the engine's"):
        run(Mesh.parse(mesh), body, deadline=20)
