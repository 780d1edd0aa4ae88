"""Optimizers that come late, and several of them: their step is the whole step, or it is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, count, deal, loss_sum
from loop_cases import ALONE, LAYOUTS, layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine, elementwise, empty_parameters
from plait.table.mesh import Mesh


def chain() -> nn.Module:
    return cases.distinct(nn.Sequential(*(cases.Block() for _ in range(4))))


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices and all others, each with its own optimizer."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.02, eps=1e-4)]


def plainly(template: nn.Module, data: list[cases.Batch], make: Any) -> dict[str, Tensor]:
    model = copy.deepcopy(template)
    optimizers = make(model)
    for batch in data:
        (loss_sum(model, batch) / count(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("where", LAYOUTS)
def test_an_optimizer_built_after_the_engine_is_used_like_one_built_before(where: str) -> None:
    mesh, row = layout(where)
    template = chain()

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        engine = Engine(model, comm, strategy=row, loss_fn=loss_sum, count_fn=count)
        engine.use(adamw(model.parameters()))
        for batch in batches(3):
            engine.step(deal(batch, comm.mesh, comm.rank, 2))
        return engine.full_state_dict(), engine.placed.bytes_held()["optimizer"]

    truth = cases.plain(template, batches(3)).state
    for state, held in run(mesh, body, deadline=20):
        assert held > 0
        assert all(cases.close(state[name], value) for name, value in truth.items())


def test_a_model_from_meta_takes_one_too() -> None:
    def body(comm: Comm, late: bool) -> Any:
        with empty_parameters():
            model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
        early = None if late else adamw(model.parameters())
        engine = Engine(model, comm, strategy="zero3", optimizer=early)
        optimizer = early or adamw(model.parameters())
        if late:
            engine.use(optimizer)
        engine.backward(model(torch.ones(2, 5)).sum(), 2)
        optimizer.step()
        return engine.full_state_dict()

    for late, early in zip(*(run(Mesh(shard=2), lambda c, w=w: body(c, w)) for w in (True, False)), strict=True):
        assert all(torch.equal(late[name], early[name]) for name in early)


@pytest.mark.parametrize("where", ALONE)
def test_a_backward_without_an_optimizer_is_refused(where: str) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> None:
        model = cases.net()
        engine = Engine(model, comm, strategy=row)
        optimizer = adamw(model.parameters())  # as FSDP2's users do
        engine.backward(loss_sum(model, batches(1)[0]), 3)
        optimizer.step()

    with pytest.raises(ValueError, match=r"no optimizer, so no step would change anything: .*engine\.use"):
        run(mesh, body, deadline=20)


@pytest.mark.parametrize("where", LAYOUTS)
def test_a_step_without_an_optimizer_is_refused(where: str) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> None:
        engine = Engine(chain(), comm, strategy=row, loss_fn=loss_sum, count_fn=count)
        engine.step(deal(batches(1)[0], comm.mesh, comm.rank, 2))

    with pytest.raises(ValueError, match="no optimizer, so no step would change anything"):
        run(mesh, body, deadline=20)


def test_a_second_optimizer_afterwards_is_refused() -> None:
    def body(comm: Comm) -> None:
        model = cases.net()
        engine = Engine(model, comm, strategy="ddp", optimizer=adamw(model.parameters()))
        engine.use(adamw(model.parameters()))

    with pytest.raises(ValueError, match="has an optimizer already"):
        run(Mesh(shard=2), body, deadline=20)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("where", LAYOUTS)
def test_two_optimizers_make_one_step(where: str, as_dict: bool) -> None:
    mesh, row = layout(where)
    template = chain()

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        sgd, adam = two(model)
        given: Any = {"matrices": sgd, "others": adam} if as_dict else [sgd, adam]
        engine = Engine(model, comm, strategy=row, optimizer=given, loss_fn=loss_sum, count_fn=count)
        for batch in batches(3):
            engine.step(deal(batch, comm.mesh, comm.rank, 2))
        return engine.full_state_dict(), engine.steps

    truth = plainly(template, batches(3), two)
    for state, steps in run(mesh, body, deadline=20):
        assert steps == 3
        assert all(cases.close(state[name], value) for name, value in truth.items())


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("where", ALONE)
def test_two_optimizers_in_a_loop_of_ones_own(where: str, swap: bool) -> None:
    """In either order, each zeroed behind its own step."""
    mesh, row = layout(where)
    template = cases.net()

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        pair = two(model)
        engine = Engine(model, comm, strategy=row, optimizer=pair)
        bad, *good = batches(4)
        engine.backward(loss_sum(model, bad), count(bad))
        for optimizer in pair:  # all thrown away
            optimizer.zero_grad()
        for batch in good:
            (part,) = deal(batch, comm.mesh, comm.rank, 1)
            engine.backward(loss_sum(model, part), count(part))
            for optimizer in reversed(pair) if swap else pair:
                optimizer.step()
                optimizer.zero_grad()
        return engine.full_state_dict(), engine.steps

    truth = plainly(template, batches(4)[1:], two)
    for state, steps in run(mesh, body, deadline=20):
        assert steps == 3
        assert all(cases.close(state[name], value) for name, value in truth.items())


def loop_of_two(wrong: str) -> None:
    def body(comm: Comm) -> None:
        model = cases.net()
        first, second = two(model)
        engine = Engine(model, comm, strategy="zero1", optimizer=[first, second])
        batch = batches(1)[0]
        for _ in range(2):
            engine.backward(loss_sum(model, batch), count(batch))
            if wrong == "zero one":
                first.zero_grad()
            first.step()
            if wrong == "twice":
                first.step()
            if wrong == "looks between":
                with torch.no_grad():
                    loss_sum(model.eval(), batch)
            if wrong != "forgotten":
                second.step()

    run(Mesh(shard=2), body, deadline=20)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("forgotten", r"AdamW has not stepped since the last backward: call step\(\) of every optimizer once"),
        ("twice", "AdamW has not stepped since the last backward"),
        ("looks between", "AdamW has not stepped since the last backward"),
        ("zero one", "without a backward before it"),
    ],
)
def test_a_loop_that_leaves_one_out_is_refused(wrong: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        loop_of_two(wrong)


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    def body(comm: Comm) -> None:
        model = cases.net()
        Engine(model, comm, optimizer=[adamw(model.parameters()), adamw([model.head.weight])])  # type: ignore[list-item, union-attr]

    with pytest.raises(ValueError, match=r"'head.weight' is in two optimizers, AdamW and AdamW"):
        run(Mesh(shard=2), body, deadline=20)


@pytest.mark.parametrize("given", [[object()], 3, {"a": "adamw"}])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"is no torch\.optim\.Optimizer"):
        run(Mesh(), lambda comm: Engine(cases.net(), comm, optimizer=given) and None)


class CallsItsBase(torch.optim.SGD):
    """Its ``step`` is its base's, whose hooks torch runs too where there has been an optimizer of the base."""

    fails = 0

    def step(self, closure: Any = None) -> Any:
        self.fails -= 1
        if not self.fails:
            raise RuntimeError("a bad day")
        return super().step(closure)


@pytest.mark.parametrize("several", [False, True])
def test_a_step_inside_of_a_step_is_one(several: bool) -> None:
    def body(comm: Comm, make: Any, fails: int) -> Any:
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        model = cases.distinct(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
        groups = [list(layer.parameters()) for layer in model] if several else [list(model.parameters())]
        made = [elementwise(make(group, lr=0.1)) for group in groups]
        engine = Engine(model, comm, strategy="zero2", optimizer=made, loss_fn=cases.loss_sum, count_fn=cases.count)
        for batch in cases.batches(3):
            engine.step(cases.deal(batch, comm.mesh, comm.rank, 1))
        if fails:
            made[0].fails = 1
            with pytest.raises(RuntimeError, match="a bad day"):
                engine.step(cases.deal(cases.batches(1)[0], comm.mesh, comm.rank, 1))
        for batch in cases.batches(2):
            engine.step(cases.deal(batch, comm.mesh, comm.rank, 1))
        return engine.steps, engine.full_state_dict()

    steps, expected = run(Mesh(shard=2), partial(body, make=torch.optim.SGD, fails=0))[0]
    for fails in (0, 1):
        found, state = run(Mesh(shard=2), partial(body, make=CallsItsBase, fails=fails))[0]
        assert found == steps == 5 and all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("ran", [False, True])
def test_a_closure_is_refused_whether_or_not_a_backward_came_before(ran: bool) -> None:
    def body(comm: Comm) -> None:
        model = chain()
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy="zero3", optimizer=optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_sum(model, batches(1)[0])
            engine.backward(loss, count(batches(1)[0]))
            return loss

        if ran:
            closure()
        before = engine.full_state_dict()
        for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
            with pytest.raises(ValueError, match=r"step\(closure\).*Run it first: loss = closure\(\); optimizer"):
                call()
        closure()
        optimizer.step(None)
        after = engine.full_state_dict()
        assert engine.steps == 1 and any(not torch.equal(before[name], after[name]) for name in after)

    run(Mesh(shard=2), body, deadline=20)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_an_optimizer_that_needs_a_closure_is_refused_when_it_is_given(row: str) -> None:
    model = chain()
    with pytest.raises(ValueError, match=r"LBFGS computes losses and gradients inside of its step\(closure\)"):
        run(Mesh(), lambda comm: Engine(model, comm, strategy=row, optimizer=torch.optim.LBFGS(model.parameters())))


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@pytest.mark.parametrize("first", [False, True])
def test_an_optimizer_that_the_engine_was_not_given_is_told_when_it_steps(row: str, first: bool) -> None:
    """Its parameters would never train.  A loop that trains some of the parameters on purpose goes on."""

    words = r"reads p\.grad, but after engine\.backward" if row == "ddp" else "while its unit is at rest"

    def body(comm: Comm) -> None:
        model = chain()
        given, other = (adamw(list(model[part].parameters())) for part in (0, 2))  # type: ignore[index]
        engine = Engine(model, comm, strategy=row, optimizer=given)
        for _ in range(2):
            engine.backward(loss_sum(model, batches(1)[0]), count(batches(1)[0]))
            if first:
                with pytest.raises(ValueError, match=words):
                    other.step()
            given.step()
            given.zero_grad()
            with pytest.raises(ValueError, match=words):
                other.step()
            model.zero_grad()
        assert engine.steps == 2

    run(Mesh(shard=2), body, deadline=20)
