"""Gradients that a program takes itself: scores, forces, penalties on gradients, and derivatives of these.

Fp64, against plain PyTorch: second derivatives must agree to 1e-11 like all other values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derivative_cases import (
    KINDS,
    PROGRAMS,
    WIDTH,
    Descending,
    Descent,
    Energy,
    Layer,
    gradient,
    leaf,
    masked,
    penalty,
    plainly,
    score,
)
from engine_cases import ROWS, SPLIT_ROWS, Batch, Made, agree, batches, count, distinct, plain, sgd, train
from programs import COPIES, SPLIT, World, check, update
from torch import Tensor, nn

from plait.step import Engine

ROWS_THAT_SPLIT = [where for where in SPLIT if where not in COPIES]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "replica=2 shard=2"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_is_that_of_one_process(program: str, mesh: str, row: str) -> None:
    kind, loss = PROGRAMS[program]
    template, data = distinct(kind()), batches(2)
    agree(train(template, mesh, row, data, loss=loss, microbatches=2), plain(template, data, loss=loss))


@pytest.mark.parametrize("row", SPLIT_ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_units_of_every_kind(kind: str, row: str) -> None:
    model, loss, frozen, settings = KINDS[kind]
    template, data = distinct(model()), batches(2)
    for name, parameter in template.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    agree(
        train(template, "replica=2 shard=2", row, data, loss=loss, microbatches=2, **settings),
        plain(template, data, loss=loss),
    )


def in_two_backwards(engine: Any, batch: Any, number: int) -> None:
    losses = [(masked(engine.model(batch["x"]), batch), count(batch)), (score(engine.model, batch), 0)]
    for loss, terms in losses[:: -1 if number else 1]:
        engine.backward(loss, terms)


def with_gradients_of_parameters(engine: Any, batch: Any, number: int) -> None:
    loss = masked(engine.model(batch["x"]), batch)
    with engine.gathered():
        parameters = list(engine.model.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        loss = loss + sum((g * p.detach()).sum() for g, p in zip(gradients, parameters, strict=True))
    engine.backward(loss, count(batch))


def with_functional_transforms(engine: Any, batch: Any, number: int) -> None:
    slopes = torch.func.vmap(torch.func.grad(lambda x: engine.model(x[None]).sum()))
    with engine.gathered():
        loss = masked(slopes(batch["x"]).square(), batch)
    engine.backward(loss, count(batch))


def beside_an_evaluation(engine: Any, batch: Any, number: int) -> None:
    engine.model.eval()
    for create_graph in (False, True):
        gradient(engine.model(x := leaf(batch)).sum(), x, create_graph=create_graph)
    with torch.no_grad():
        engine.model(batch["x"])
    engine.backward(penalty(engine.model.train(), batch), count(batch))


LOOPS = [in_two_backwards, with_gradients_of_parameters, with_functional_transforms, beside_an_evaluation]


@pytest.mark.parametrize("where", ["zero2", *ROWS_THAT_SPLIT])
@pytest.mark.parametrize("loop", LOOPS)
def test_in_a_loop_of_a_program(loop: Any, where: str) -> None:
    def program(world: World) -> Any:
        engine = world.engine(distinct(Energy()))
        for number, batch in enumerate(batches(2)):
            loop(engine, world.part(batch), number)
            update(engine)
        return engine.full_state_dict()

    check(program, where)


def path_loss(g: nn.Module, x: Tensor) -> Tensor:
    noise = x.clone().requires_grad_()
    return gradient(g(noise).sum(), noise).square().sum()


@pytest.mark.parametrize("where", ["ddp", "zero2", *ROWS_THAT_SPLIT])
def test_a_generator_and_a_critic_with_penalties(where: str) -> None:
    def program(world: World) -> Any:
        g = world.engine(distinct(nn.Sequential(Layer(), nn.Linear(WIDTH, WIDTH)), seed=1), sgd)
        d = world.engine(distinct(Energy(), seed=2), sgd)
        for x in (world.part(batch)["x"] for batch in batches(3)):
            fake = g.model(x).detach()
            middle = (0.3 * x + 0.7 * fake).requires_grad_()
            slope = gradient(d.model(middle).sum(), middle)
            loss = (d.model(fake) - d.model(x)).sum() + 10 * (slope.norm(dim=1) - 1).square().sum()
            d.backward(loss, len(x))
            update(d)
            g.backward(path_loss(g.model, x) - d.model(g.model(x)).sum(), len(x), also=[d])
            update(g)
            d.optimizers[0].zero_grad()
        return g.full_state_dict(), d.full_state_dict()

    check(program, where)


def test_a_gradient_inside_of_a_block_gathers_nothing_and_keeps_nothing_whole() -> None:
    def gathered(engine: Engine) -> Any:
        entries = engine.comm.ledger.entries
        return engine.placed.bytes_held()["gathered_peak"], [
            e.note.unit for e in entries if e.note.phase == "inner backward"
        ]

    template, data = distinct(Descent(7)), batches(1)
    for record in train(template, "shard=2", "zero3", data, loss=plainly, look=gathered, prefetch=0):
        peak, inner = record.seen
        assert inner == [] and peak < 0.5 * sum(p.nbytes for p in template.parameters())
    for record in train(distinct(Energy()), "shard=2", "zero3", data, loss=score, look=gathered, prefetch=0):
        assert record.seen[1] == ["root", "head", "layers.2", "layers.1", "layers.0", "first"]


def links() -> nn.Module:
    return distinct(nn.Sequential(Descending(), Descending(), Descending(), nn.Linear(WIDTH, 1)))


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3_keep", "hpz"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_inside_of_a_link_of_a_pipeline(row: str, schedule: str) -> None:
    template, data = links(), batches(2)
    ranks = train(template, "pipe=2 shard=2", row, data, loss=plainly, microbatches=3, schedule=schedule)
    agree(ranks, plain(template, data, loss=plainly))


def silent(model: nn.Module, batch: Batch) -> Tensor:
    return masked(gradient(model(x := leaf(batch)).sum(), x, allow_unused=True, materialize_grads=True), batch)


class Sloping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return gradient(super().forward(x).sum(), x, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@pytest.mark.parametrize("loss", [score, silent, plainly])
def test_through_several_links_of_a_pipeline_it_is_refused(row: str, loss: Any) -> None:
    """Where the input is on another stage torch would call it unused, or give zeros."""
    kind = Sloping if loss is plainly else nn.Sequential
    with pytest.raises(ValueError, match="outside of the pipeline's links"):
        train(kind(Layer(), Layer(), nn.Linear(WIDTH, 1)).double(), "pipe=2", row, batches(1), loss=loss)


def transformed(model: nn.Module, batch: Batch) -> Tensor:
    return masked(torch.func.grad(lambda x: model(x).sum())(batch["x"]), batch)


def borrowing() -> nn.Module:
    """Reads a parameter of another unit inside of a transform."""
    run = lambda m, x: m.second(m.first(x) + torch.func.grad(lambda z: (z * m.first.bias).sin().sum())(x))  # noqa: E731
    return Made(run, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, 1))


@pytest.mark.parametrize(("kind", "loss"), [(Energy, transformed), (borrowing, plainly)])
def test_a_transform_of_torch_func_with_parameters_at_rest_is_refused(kind: Any, loss: Any) -> None:
    with pytest.raises(ValueError, match=r"unit 'root'.*torch\.func.*engine\.gathered"):
        train(distinct(kind()), "shard=2", "zero3", batches(1), loss=loss)
