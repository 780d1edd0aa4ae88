"""The schedule of the sanitizers: the first three steps and every hundredth; between them they do nothing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import adamw, batches, count, loss_sum, net
from torch import nn

from plait import run_threads
from plait.comm import Comm
from plait.referee.sanitize import Sanitizers, sanitized
from plait.step import Engine
from plait.table.mesh import Mesh


def test_they_work_in_the_first_steps_and_in_every_hundredth() -> None:
    def body(comm: Comm) -> list[int]:
        model = net()
        engine = Engine(model, comm, strategy="zero3", optimizer=adamw(model.parameters()))
        (sanitizers,) = engine._watchers
        worked: list[Any] = []
        sanitizers._all = [lambda event, engine: worked.append((engine.number, event))]
        for number in range(201):
            stand_in: Any = SimpleNamespace(optimizers=engine.optimizers, placed=engine.placed, number=number)
            sanitizers("begun", stand_in)
            sanitizers("reduced", stand_in)
        assert [number for number, event in worked if event == "off"] == [3, 101]
        return [number for number, event in worked if event == "reduced"]

    assert run_threads("shard=1", body) == [[0, 1, 2, 100, 200]]


def test_a_world_has_them_once_and_only_where_they_are_wanted() -> None:
    assert run_threads("shard=1", lambda comm: sanitized(comm).engine_watchers) == [(Sanitizers,)]
    assert run_threads("shard=1", lambda comm: comm.engine_watchers, sanitize=False) == [()]


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
        engine.step([part]) if face == "step" else engine.backward(loss_sum(model, part), count(part))

    with pytest.raises(ValueError, match=f"changed after its Engine was built: '{CHANGES[change][1]}'"):
        run_threads(Mesh(), body)
