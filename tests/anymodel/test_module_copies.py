"""A stage's copies of modules follow the changes that a program makes between steps."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import WIDTH, batches, distinct, loss_sum
from links_cases import Chain, chain
from pipeline_cases import engine_on, linear, on, refused, step
from torch import Tensor, nn

from plait.comm import Comm


class Settings(Chain):
    """Reads what a program may set, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__(*(linear() for _ in range(4)))
        self.factor, self.config, self.calls = 1.0, {"factor": 1.0}, 0
        self.register_buffer("replaced", torch.ones(()))
        self.register_buffer("written", torch.ones(()))
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counted += 1
        for link in self.links:
            x = link(x) * self.factor * self.config["factor"]
        return x * self.replaced * self.written / (1 + self.calls + self.counted + self.training)


def as_alone(template: nn.Module, mesh: str, before: Callable[[Any, int], None], **settings: Any) -> list[Any]:
    """Trains it on the mesh too, and returns each rank's model."""

    def body(comm: Comm) -> tuple[list[float], nn.Module]:
        engine, losses = engine_on(copy.deepcopy(template), comm, **settings), []
        for number, batch in enumerate(batches(3)):
            before(engine.model, number)
            losses.append(step(engine, batch, 1).loss)
        return losses, engine.model

    numbers = itertools.count()

    def loss(model: nn.Module, batch: cases.Batch) -> Tensor:
        before(model, next(numbers))
        return loss_sum(model, batch)

    wanted = cases.plain(template, batches(3), loss=loss).losses
    ranks = on(mesh, body)
    for losses, _ in ranks:
        assert losses == pytest.approx(wanted, rel=1e-12)
    return [model for _, model in ranks]


SETTERS: dict[str, Callable[[Any, int], object]] = {
    "a number": lambda model, number: setattr(model, "factor", 1 + number / 4),
    "inside of an attribute": lambda model, number: model.config.update(factor=1 + number / 4),
    "a buffer": lambda model, number: setattr(model, "replaced", torch.tensor(1 + number / 4, dtype=torch.float64)),
    "values of a buffer": lambda model, number: model.written.fill_(1 + number / 4),
    "the mode": lambda model, number: model.train(number != 1),
}


@pytest.mark.parametrize("what", SETTERS)
@pytest.mark.parametrize(("mesh", "order"), [("pipe=2", "1f1b"), ("pipe=2", "zbv"), ("pipe=4", "gpipe")])
def test_what_is_set_between_steps_is_seen_on_every_stage(what: str, mesh: str, order: str) -> None:
    as_alone(distinct(Settings()), mesh, SETTERS[what], schedule=order)


def test_a_module_with_buffers_in_two_blocks_is_refused() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = chain(linear(), norm, linear(), linear(), norm, linear())
    refused("buffer 'l4.running_mean' is in the blocks 'l1' and 'l4', and each stage would write its own", model)


class OneScale(Chain):
    """Each link is multiplied by one parameter of the model."""

    def __init__(self) -> None:
        super().__init__(*(linear() for _ in range(4)))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x) * self.scale
        return x


@torch.no_grad()
def clamp(model: Any, number: int, data: bool) -> None:
    (model.scale.data if data else model.scale).clamp_(0.4, 0.5 + number)


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("row", ["ddp", "zero1"])
def test_a_weight_of_two_stages_is_written_once(data: bool, order: str, row: str) -> None:
    as_alone(distinct(OneScale()), "pipe=2", partial(clamp, data=data), schedule=order, strategy=row)


@pytest.mark.parametrize("split", [(1, 3), (2, 2), (3, 1)])
def test_a_hook_that_is_added_to_a_link_later(split: tuple[int, int]) -> None:
    def add(model: Any, number: int) -> None:
        if number == 1:
            model.l1.register_forward_hook(lambda module, args, output: output / 2)

    as_alone(chain(*(linear() for _ in range(4))), "pipe=2", add, split=split)


class WritesBeside(Chain):
    """Its links add to a tensor that they are all given."""

    class Link(nn.Linear):
        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            y = super().forward(x)
            total.add_(y.square().sum())
            return y

    def __init__(self) -> None:
        super().__init__(*(self.Link(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for link in self.links:
            x = link(x, total)
        return x + total


def test_a_link_that_writes_beside_its_stream_is_refused() -> None:
    refused("'l0' writes in place to a tensor that it is given besides the stream", distinct(WritesBeside()))


@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zbv"])
def test_a_block_that_is_several_links_runs_again_on_each_stage(order: str) -> None:
    model = nn.Sequential(*[cases.Block()] * 4, linear())
    as_alone(distinct(model), "pipe=2", lambda model, number: None, schedule=order, recompute="full")
