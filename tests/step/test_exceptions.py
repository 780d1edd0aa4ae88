"""When a rank raises: its own traceback, the others stop at once, and code that catches it can go on.

A dropped engine frees its memory, also after an error.  Python's collector does not see a parameter's hook in autograd;
one that refers back to the engine keeps it, and every tensor of the run, for the life of the process.
"""

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import engine_cases as cases
import pytest
import tensor_models
import torch
from engine_cases import batches, count, deal, loss_sum, net
from pipeline_cases import build, chain
from programs import ALONE, World, assert_same, on_ranks, update
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine, elementwise
from plait.table.mesh import Mesh


class CallsItsBase(torch.optim.SGD):
    """Its ``step`` is its base's, whose hooks torch runs too where there has been an optimizer of the base."""

    fails = 0

    def step(self, closure: Any = None) -> Any:
        self.fails -= 1
        if not self.fails:
            raise MemoryError("a bad day")
        return super().step(closure)


def broken(kind: str, engine: Any, parts: list[cases.Batch]) -> None:
    """A step of the engine's own, whose second microbatch raises in the forward or in the backward of a block."""
    outputs: list[Tensor] = []

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append(output)
        if len(outputs) == 2 and kind == "a block's forward":
            raise ZeroDivisionError
        if len(outputs) == 2:
            output.register_hook(lambda gradient: 1 / 0)

    handle = engine.model.blocks[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.step(parts)
    handle.remove()


def rescued(kind: str, world: World) -> Any:
    """Three steps, in the second of which something raises first, where ``kind`` says so."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    make = CallsItsBase if kind not in ("", "a block") else torch.optim.SGD
    engine = world.engine(cases.net(2), lambda p: [elementwise(make(half, lr=0.1)) for half in (p[:5], p[5:])])
    for number, batch in enumerate(batches(3)):
        parts = world.parts(batch, 2)
        if number == 1 and kind.startswith("a block"):
            if kind != "a block":
                broken(kind, engine, parts)
            engine.step(parts)
            continue
        for part in parts:
            engine.backward(loss_sum(engine.model, part), count(part))
        if number == 1 and kind == "backward":
            loss = loss_sum(engine.model, parts[0])
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss, 3)
        elif number == 1 and kind in ("again", "zero_grad"):
            engine.optimizers[0].fails = 1
            with pytest.raises(MemoryError):
                update(engine)
        if number == 1 and kind in ("backward", "zero_grad"):
            if kind == "zero_grad":
                engine.optimizers[0].zero_grad()
            for part in parts:
                engine.backward(loss_sum(engine.model, part), count(part))
        update(engine)
    assert engine.steps == 3
    return engine.full_state_dict()


KINDS = ["again", "zero_grad", "backward", "inside of a step", "a block's forward", "a block's backward"]


@pytest.mark.parametrize("where", ALONE[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_after_one_that_raised_is_as_if_nothing_had_been(kind: str, where: str) -> None:
    straight = "a block" if kind.startswith("a block") else ""  # a step of the engine's own rounds otherwise
    assert_same(on_ranks(partial(rescued, kind), where), on_ranks(partial(rescued, straight), where))


def harmed() -> nn.Module:
    """Its backward raises."""
    model: Any = net(2)
    model.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(lambda gradient: 1 / 0) and None)
    return model


LAYOUTS: dict[str, tuple[nn.Module, str, dict[str, Any]]] = {
    "replicated": (net(2), "replica=2", {"strategy": "ddp"}),
    "split": (net(2), "shard=2", {"strategy": "zero3", "clip": 1.0}),
    "recomputed": (net(2), "shard=2", {"strategy": "zero3", "recompute": "full"}),
    "pipeline": (chain(), "pipe=2", {"strategy": "zero3", "schedule": "zbv"}),
    "tensor": (tensor_models.model(), "tensor=2", {"strategy": "ddp", "sequence_parallel": True}),
    "backward raised": (harmed(), "shard=2", {"strategy": "zero3"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dropped_engine_is_freed(layout: str) -> None:
    template, mesh, settings = LAYOUTS[layout]
    data = tensor_models.token_batches(1) if layout == "tensor" else batches(1)
    held: list[Any] = []

    def body(comm: Comm) -> None:
        engine = build(template, comm, **settings)
        with pytest.raises(ZeroDivisionError) if layout == "backward raised" else nullcontext():
            for microbatches in (4, 5):
                engine.step(deal(data[0], comm.mesh, comm.rank, microbatches))
        parameters = [p for stage in engine.placed.stages.values() for p in stage.model.parameters()]
        held.extend(map(ref, (engine, engine.model, *parameters)))

    run(Mesh.parse(mesh), body, deadline=20)
    gc.collect()
    assert len(held) > 4 and not [type(still).__name__ for one in held if (still := one()) is not None]


def test_the_model_keeps_its_engine() -> None:
    engine = Engine(model := net(1), *run(Mesh(), lambda comm: comm))
    still = ref(engine)
    del engine
    gc.collect()
    with pytest.raises(ValueError, match=r"call engine.backward\(loss, count\) instead of loss.backward"):
        loss_sum(model, batches(1)[0]).backward()
    assert still() is not None
