"""A model must stay the one that its engine was built on; later changes would silently not train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, count, loss_sum, net
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


def load_by_swapping(model: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.head.load_state_dict({"bias": torch.zeros(3).double()}, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape).double())


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "module": (lambda m: setattr(m, "head", nn.Linear(cases.WIDTH, 3).double()), "head"),
    "block": (lambda m: m.blocks.__setitem__(1, cases.Block().double()), "blocks.1"),
    "blocks swapped": (lambda m: m.blocks.insert(0, m.blocks.pop(1)), "blocks.0"),
    "parameter": (lambda m: setattr(m.head, "weight", zeros(3, cases.WIDTH)), "head.weight"),
    "more": (lambda m: m.register_parameter("more", zeros(3)), "more"),
    "no bias": (lambda m: setattr(m.head, "bias", None), "head.bias"),
    "more modules": (lambda m: m.add_module("more", nn.Linear(3, 3).double()), "more"),
    "tensors swapped": (lambda m: torch.utils.swap_tensors(m.head.weight, zeros(3, cases.WIDTH)), "head.weight"),
    "loaded by swapping": (load_by_swapping, "head.bias"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("face", ["step", "loop"])
def test_a_sanitizer_names_a_change_after_the_engine_was_built(face: str, change: str) -> None:
    def body(comm: Comm) -> None:
        model = net()
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy="ddp", optimizer=optimizer, loss_fn=loss_sum, count_fn=count)
        part = batches(1)[0]
        engine.step([part])
        CHANGES[change][0](model)
        if face == "step":
            engine.step([part])
        else:
            engine.backward(loss_sum(model, part), count(part))

    with pytest.raises(ValueError, match=f"changed after its Engine was built: '{CHANGES[change][1]}'"):
        run(Mesh(), body)
