"""What goes from link to link of a model that nobody wrote for a pipeline: one list of blocks, inside of anything."""

from __future__ import annotations

import engine_cases as cases
import pytest
from crossing_cases import (
    LAYOUTS,
    Between,
    Carried,
    Changing,
    Deep,
    InPlace,
    Masked,
    Nested,
    Records,
    Remembered,
    Skipping,
    Tower,
    Tuples,
    Twice,
)
from engine_cases import batches, distinct, loss_sum
from pipeline_cases import build, on, same, step
from torch import nn

from plait.comm import Comm

SHAPES = (
    *(Tower, Masked, Tuples, Records, Remembered, Carried, Between),
    *(Twice, Skipping, Nested, Changing, InPlace, Deep),
)


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("kind", SHAPES)
def test_a_model_with_one_list_of_blocks_is_the_run_of_one_process(kind: type[nn.Module], turn: int) -> None:
    """Each shape under three layouts, so that each layout has every second shape."""
    mesh, row, settings = LAYOUTS[(SHAPES.index(kind) + 2 * turn) % len(LAYOUTS)]
    same(distinct(kind()), mesh, row, **settings)


@pytest.mark.parametrize("kind", [Remembered, Carried, Records])
def test_what_crosses_does_so_under_no_grad_too(kind: type[nn.Module]) -> None:
    """An evaluation before the first step learns what later links are given; so does a model that is half frozen."""
    template, data = distinct(kind()), batches(1)
    template.get_submodule("embed").requires_grad_(False)

    def body(comm: Comm) -> tuple[float, float]:
        engine = build(template, comm)
        before = engine.evaluate([data[0]]).loss
        return before, step(engine, data[0], 1).loss

    wanted = (loss_sum(template, data[0]) / cases.count(data[0])).item()
    for found in on("pipe=3", body):
        assert found == pytest.approx((wanted, wanted), abs=1e-12)
