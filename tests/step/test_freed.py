"""A dropped engine frees its memory: models, gradients and optimizer state go with the last reference to them.

Python's collector does not see a parameter's hook in autograd.  A hook that refers back to the engine keeps it, and
every tensor of the run, for the life of the process; and each collection walks through all of it, while every thread
of a thread world waits.
"""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import tensor_models
from engine_cases import batches, deal, loss_sum, net
from pipeline_cases import build, chain
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh

LAYOUTS: dict[str, tuple[nn.Module, str, dict[str, Any]]] = {
    "replicated": (net(2), "replica=2", {"strategy": "ddp"}),
    "split": (net(2), "shard=2", {"strategy": "zero3", "clip": 1.0}),
    "recomputed": (net(2), "shard=2", {"strategy": "zero3", "recompute": "full"}),
    "pipeline": (chain(), "pipe=2", {"strategy": "zero3", "schedule": "zbv"}),
    "tensor": (tensor_models.model(), "tensor=2", {"strategy": "ddp", "sequence_parallel": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dropped_engine_is_freed(layout: str) -> None:
    template, mesh, settings = LAYOUTS[layout]
    data = tensor_models.token_batches(1) if layout == "tensor" else batches(1)
    held: list[Any] = []

    def body(comm: Comm) -> None:
        engine = build(template, comm, **settings)
        for microbatches in (4, 5):
            engine.step(deal(data[0], comm.mesh, comm.rank, microbatches))
        parameters = [p for stage in engine.placed.stages.values() for p in stage.model.parameters()]
        held.extend(map(ref, (engine, engine.model, *parameters)))

    run(Mesh.parse(mesh), body, deadline=20)
    gc.collect()
    assert len(held) > 4 and not [type(still).__name__ for one in held if (still := one()) is not None]


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError("in the backward")


def test_an_engine_whose_backward_raised_is_freed() -> None:
    held: list[Any] = []

    def body(comm: Comm) -> None:
        engine = build(net(2), comm, strategy="zero3")
        engine.model.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(_raise) and None)
        with pytest.raises(ZeroDivisionError):
            engine.step(deal(batches(1)[0], comm.mesh, comm.rank, 2))
        held.extend(map(ref, (engine, engine.model)))

    run(Mesh(shard=2), body, deadline=20)
    gc.collect()
    assert held and not [one for one in held if one() is not None]


def test_the_model_keeps_its_engine() -> None:
    engine = Engine(model := net(1), *run(Mesh(), lambda comm: comm))
    still = ref(engine)
    del engine
    gc.collect()
    with pytest.raises(ValueError, match=r"call engine.backward\(loss, count\) instead of loss.backward"):
        loss_sum(model, batches(1)[0]).backward()
    assert still() is not None
