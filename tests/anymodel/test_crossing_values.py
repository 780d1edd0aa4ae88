"""Values that go from link to link of a stock model: each stage has those of a single process."""

from typing import Any

import engine_cases as cases
import pytest
import torch
from crossing_cases import LAYOUTS, SHAPES, Between, Carried, Chain, Gated, Records, Remembered, Tower
from each_rank import each_rank
from engine_cases import batches, distinct, loss_sum
from pipeline_cases import as_one_stage, build, linear, same, step
from torch import Tensor, nn

from plait.comm import Comm


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("kind", SHAPES)
def test_a_model_with_one_list_of_blocks_is_the_run_of_one_process(kind: type[nn.Module], turn: int) -> None:
    """Each shape under three layouts, so that each layout has every second shape."""
    mesh, row, settings = LAYOUTS[(SHAPES.index(kind) + 2 * turn) % len(LAYOUTS)]
    same(distinct(kind()), mesh, row, **settings)


def test_units_are_gathered_in_one_order_where_a_shape_is_new_on_one_rank_alone() -> None:
    same(distinct(Between()), "pipe=2 shard=2", "zero3", schedule="gpipe", hold=None)


@pytest.mark.parametrize("kind", [Remembered, Carried, Records])
@each_rank("pipe=3")
def test_what_crosses_does_so_under_no_grad_too(comm: Comm, kind: type[nn.Module]) -> None:
    """An evaluation before the first step learns what later links are given; so does a model that is half frozen."""
    template, data = distinct(kind()), batches(1)
    template.get_submodule("embed").requires_grad_(False)
    wanted = (loss_sum(template, data[0]) / cases.count(data[0])).item()
    engine = build(template, comm)
    assert engine.evaluate([data[0]]).loss == pytest.approx(wanted, abs=1e-12)
    assert step(engine, data[0], 1).loss == pytest.approx(wanted, abs=1e-12)


class Measured(Tower):
    """Two tensors are read at both ends: the embedding's count, and how large it finds the microbatch."""

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = linear(), 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.inner(x), torch.tensor(self.calls), x.abs().max()

    def __init__(self) -> None:
        super().__init__()
        self.embed = self.Embed()

    def forward(self, x: Tensor) -> Tensor:
        x, number, largest = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)) / number * largest.item()
        return out if largest > 2 else -out


@pytest.mark.parametrize("mesh, order", [("pipe=2", "gpipe"), ("pipe=3", "1f1b"), ("pipe=2", "zbv")])
def test_numbers_that_are_tensors_and_draws_are_those_of_the_microbatch(mesh: str, order: str) -> None:
    for model in (Measured(), Between(dropout=0.2)):
        as_one_stage(distinct(model), mesh, schedule=order)


def test_a_later_stage_knows_what_a_module_returned_in_each_of_its_calls() -> None:
    """The second stage runs the gate too, and learns a call that the first does not make."""

    class Twice(Chain):
        def forward(self, x: Tensor) -> Tensor:
            weight, _ = self.gate(0)
            x = self.l0(x) * weight
            weight, number = self.gate(1)
            x = self.l1(x) * weight
            return self.l2(x) * number

    model = Twice(linear(), linear(), linear())
    model.gate = Gated.Gate()
    same(distinct(model), "pipe=3")


class Attending(nn.Module):
    """Returns a value beside its output; the first one's is given to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        own = self.inner(x)
        return torch.tanh(own if value is None else own + value / 2), own


class ValueResidual(nn.Module):
    """Links of two classes in turns, which return a pair and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = linear(), linear()
        self.attention = nn.ModuleList(Attending() for _ in range(3))
        self.feedforward = nn.ModuleList(cases.Block() for _ in range(3))

    def pipeline_links(self) -> list[str]:
        return [f"{kind}.{number}" for number in range(3) for kind in ("attention", "feedforward")]

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.embed(x), None
        for attention, feedforward in zip(self.attention, self.feedforward, strict=True):
            x, value = attention(x, value=first)
            first = value if first is None else first
            x = feedforward(x) + x
        return self.head(x)


@pytest.mark.parametrize("split", [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)])
def test_links_of_two_classes_stand_for_what_each_returns(split: tuple[int, int]) -> None:
    same(distinct(ValueResidual()), "pipe=2", "ddp", schedule="1f1b", data=batches(2), split=split)
