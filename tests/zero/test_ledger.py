"""A step sends exactly the table's messages, and across replicas once a step."""

from __future__ import annotations

import engine_cases as cases
import pytest
from engine_cases import ROWS, batches, sgd, train
from pipeline_cases import build, on, step
from torch import nn

from plait.predict.cost import differences, predict_step
from plait.step import Engine


class Reader(cases.Net):
    """The model's own code reads a parameter of a unit inside of it."""

    def forward(self, x_BC: cases.Tensor) -> cases.Tensor:
        return super().forward(x_BC) + (x_BC @ self.first.weight)[:, :3]


class Unused(cases.Net):
    """A unit whose output the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, cases.WIDTH)

    def forward(self, x_BC: cases.Tensor) -> cases.Tensor:
        y_BC = super().forward(x_BC)
        self.unused(y_BC)
        return y_BC


class TwoStreams(cases.Net):
    """A second stream enters by a tied weight, later than the first; neither input wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(cases.WIDTH, cases.WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x_BC: cases.Tensor) -> cases.Tensor:
        return super().forward(x_BC) + self.second(x_BC)[:, :3]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("model", [Reader, Unused, TwoStreams])
def test_the_ledger_is_the_prediction_where_units_are_read_from_elsewhere(row: str, model: type[cases.Net]) -> None:
    """In the second step."""

    def look(engine: Engine) -> None:
        comm = engine.comm
        mark = len(comm.ledger.entries)
        step(engine, batches(1)[0], 2)
        predicted = predict_step(engine.placed.layouts(), comm.mesh, engine.placed.strategy, 2, comm.rank)
        assert differences(predicted, list(comm.ledger.entries[mark:])) == []

    train(cases.distinct(model()), "replica=2 shard=2", row, batches(1), sgd, microbatches=2, look=look)


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2"])
def test_reductions_are_issued_in_one_order_on_all_ranks(row: str) -> None:
    """Also where a rank runs its units in another order, or not at all."""

    class Shuffled(cases.Net):
        def through(self, x_BC: cases.Tensor) -> cases.Tensor:
            for k in self._order:
                x_BC = self.blocks[k](x_BC)
            return x_BC

    template = cases.distinct(Shuffled())

    def body(comm: cases.Comm) -> list[str]:
        engine = build(template, comm, strategy=row, optimizer=sgd)
        engine.model._order = [(0, 1, 2), (2, 0), (1,)][comm.rank]
        for batch in batches(2):
            step(engine, batch, 2)
        return [str(e) for e in comm.ledger.entries if e.kind in ("all_reduce", "reduce_scatter")]

    first, *others = on("shard=3", body)
    assert first and all(other == first for other in others)
