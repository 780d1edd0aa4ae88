"""A model stays the one that its engine was built on; what was changed later would silently not train."""

from __future__ import annotations

from collections.abc import Callable

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, count, loss_sum, net
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


def replace_module(model: cases.Net) -> None:
    model.head = nn.Linear(cases.WIDTH, 3).double()


def replace_block(model: cases.Net) -> None:
    model.blocks[1] = cases.Block().double()


def swap_blocks(model: cases.Net) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def replace_parameter(model: cases.Net) -> None:
    model.head.weight = nn.Parameter(torch.zeros(3, cases.WIDTH).double())


def add_parameter(model: cases.Net) -> None:
    model.register_parameter("more", nn.Parameter(torch.zeros(3).double()))


def remove_parameter(model: cases.Net) -> None:
    model.head.bias = None


def swap_tensors(model: cases.Net) -> None:
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.zeros(3, cases.WIDTH).double()))


def load_by_swapping(model: cases.Net) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.head.load_state_dict({"bias": torch.zeros(3).double()}, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def add_module(model: cases.Net) -> None:
    model.more = nn.Linear(3, 3).double()


CHANGES: dict[Callable[[cases.Net], None], str] = {
    replace_module: "head",
    replace_block: "blocks.1",
    swap_blocks: "blocks.0",
    replace_parameter: "head.weight",
    add_parameter: "more",
    remove_parameter: "head.bias",
    add_module: "more",
    swap_tensors: "head.weight",
    load_by_swapping: "head.bias",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("face", ["step", "loop"])
def test_a_sanitizer_names_a_change_after_the_engine_was_built(face: str, change: Callable[[cases.Net], None]) -> None:
    def body(comm: Comm) -> None:
        model = net()
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy="ddp", optimizer=optimizer, loss_fn=loss_sum, count_fn=count)
        part = batches(1)[0]
        engine.step([part])
        change(model)  # type: ignore[arg-type]
        if face == "step":
            engine.step([part])
        else:
            engine.backward(loss_sum(model, part), count(part))

    with pytest.raises(ValueError, match=f"changed after its Engine was built: '{CHANGES[change]}'"):
        run(Mesh(), body)
