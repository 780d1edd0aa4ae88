"""Parameters in the memory of another tensor or engine are refused only if they would be separated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine, empty_parameters
from plait.table.mesh import Mesh


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))


def in_a_larger_one(model: Any) -> None:
    model.flat = torch.zeros(40)
    model.first, model[0].weight.data = model.flat[:5], model.flat[10:30].view(5, 4)


SHARED: dict[str, Callable[[Any], object]] = {
    "parameter": lambda m: setattr(m[1], "weight", nn.Parameter(m[0].weight)),
    "data": lambda m: setattr(m[1].weight, "data", m[0].weight.data),
    "part": lambda m: setattr(m[1], "weight", nn.Parameter(m[0].weight.detach()[1:])),
    "buffer": lambda m: m.register_buffer("table", m[0].weight.detach()),
    "attribute": lambda m: setattr(m[1], "turned", m[0].weight.t()),
    "values": lambda m: setattr(m[1], "copied", m[0].weight.detach()),
    "in a list with itself": lambda m: (it := [m[0].weight.data]).append(it) or setattr(m[1], "kept", {"values": it}),
    "array": lambda m: setattr(m[1], "kept", [m[0].weight.detach().numpy()]),
    "in a larger one": in_a_larger_one,
}


def engine_on(model: nn.Module) -> Engine:
    return run(Mesh(), lambda comm: Engine(model, comm))[0]


@pytest.mark.parametrize("share", SHARED)
def test_what_shares_memory_with_a_parameter_that_trains_is_refused(share: str) -> None:
    model = pair()
    SHARED[share](model)
    with pytest.raises(ValueError, match=r"'.*' and '.*' are two tensors in one memory.*share the parameter itself"):
        engine_on(model)
    engine_on(model.requires_grad_(False))  # neither moves


def test_also_without_memory() -> None:
    with empty_parameters():
        model = pair()
        SHARED["parameter"](model)
    with pytest.raises(ValueError, match="two tensors in one memory"):
        engine_on(model)


def test_what_lies_side_by_side_is_taken() -> None:
    """As a recurrent layer of torch's has its weights on an accelerator, and a model that another engine has laid."""
    model, flat = pair(), torch.zeros(40)
    for parameter, memory in zip(model.parameters(), flat.split(20), strict=True):
        parameter.data = memory.view(parameter.shape)
    engine_on(model)
    tied = pair()
    tied[1].weight = tied[0].weight
    tied.every, tied.copies = list(tied.parameters()), [tied[0].weight.detach().clone().numpy()]
    engine_on(tied)


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3"])
def test_a_parameter_has_one_engine(row: str) -> None:
    def body(comm: Comm) -> None:
        encoder = nn.Linear(4, 4)
        first, second = (nn.Sequential(encoder, nn.Linear(4, 1)) for _ in range(2))
        for parameter in [*first.parameters(), *second.parameters()]:
            nn.init.constant_(parameter, 0.1)
        Engine(first, comm, strategy=row)
        for again in (second, first):
            with pytest.raises(ValueError, match=r"'0\.weight' is a parameter that another Engine drives.*model anew"):
                Engine(again, comm, strategy=row)

    run(Mesh(shard=2), body)
    shared = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"is one parameter on several ranks.*copy\.deepcopy"):
        run(Mesh(shard=2), lambda comm: Engine(shared, comm, strategy=row))
