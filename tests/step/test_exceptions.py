"""When a rank raises: its own traceback, the others stop at once, and whoever catches it can go on."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import ROWS, adamw, batches, count, deal, loss_sum
from programs import World, assert_same, on_ranks, update
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine, elementwise
from plait.table.mesh import Mesh


class Failing(cases.Block):
    """Raises in forward or backward while ``broken`` says so."""

    broken = ""

    def forward(self, x_BC: Tensor) -> Tensor:
        if self.broken == "forward":
            raise ArithmeticError("of the user's own")
        out: Tensor = super().forward(x_BC)
        if self.broken == "backward" and out.requires_grad:
            out.register_hook(self.fail)
        return out

    def fail(self, gradient: Tensor) -> Tensor:
        raise ArithmeticError("of the user's own")


def failing() -> nn.Module:
    model = cases.Net(3)
    model.blocks[1] = Failing()
    return cases.distinct(model)


def build(template: nn.Module, comm: Comm, row: str) -> Engine:
    model = copy.deepcopy(template)
    return Engine(
        model, comm, strategy=row, optimizer=adamw(model.parameters()), loss_fn=loss_sum, count_fn=count, clip=0.5
    )


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_caught_exception_the_next_step_is_as_if_nothing_had_been(row: str, where: str) -> None:
    """All ranks fail assert_same, in the second microbatch, and catch it: nothing of the failed step stays."""
    template, data = failing(), batches(4)

    def body(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        states = []
        for fails in (False, True):
            engine = build(template, comm, row)
            for number, batch in enumerate(data):
                parts = deal(batch, comm.mesh, comm.rank, 2)
                if fails and number == 2:
                    broken = engine.model.blocks[1]  # type: ignore[union-attr, index]
                    with pytest.raises(ArithmeticError):
                        calls = iter(("", where))
                        hook = broken.register_forward_pre_hook(
                            lambda module, args, calls=calls: setattr(module, "broken", next(calls, where))
                        )
                        engine.step(parts)
                    hook.remove()
                    broken.broken = ""
                result = engine.step(parts)
                assert result.step == number
            states.append(engine.full_state_dict())
        return states[0], states[1]

    for straight, again in run(Mesh(replica=2, shard=2), body, deadline=20):
        assert all(torch.equal(straight[name], again[name]) for name in straight)


class CallsItsBase(torch.optim.SGD):
    """Its ``step`` is its base's, whose hooks torch runs too where there has been an optimizer of the base."""

    fails = 0

    def step(self, closure: Any = None) -> Any:
        self.fails -= 1
        if not self.fails:
            raise MemoryError("a bad day")
        return super().step(closure)


def rescued(kind: str, world: World) -> Any:
    """Three steps, in the second of which something raises first, where ``kind`` says so."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    make = CallsItsBase if kind else torch.optim.SGD
    engine = world.engine(cases.net(2), lambda p: [elementwise(make(half, lr=0.1)) for half in (p[:5], p[5:])])
    for number, batch in enumerate(batches(3)):
        parts = world.parts(batch, 2)
        for part in parts:
            engine.backward(loss_sum(engine.model, part), count(part))
        if number == 1 and kind == "backward":
            loss = loss_sum(engine.model, parts[0])
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss, 3)
        elif number == 1 and kind:
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


@pytest.mark.parametrize("where", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("kind", ["again", "zero_grad", "backward", "nothing"])
def test_a_step_after_one_that_raised_is_as_if_nothing_had_been(kind: str, where: str) -> None:
    kind = kind if kind != "nothing" else "a step inside of a step"
    assert_same(on_ranks(partial(rescued, kind), where), on_ranks(partial(rescued, ""), where))
