"""The norm is global: every element counts once, on however many ranks it is, cut or whole."""

from __future__ import annotations

import math
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import batches, net, sgd, train
from programs import World, assert_same, check, on_ranks, step
from torch import Tensor, nn

from plait.step import Engine


@pytest.mark.parametrize("where", ["ddp", "zero2", "hsdp"])
@pytest.mark.parametrize("cut", ["element", "tensor"])
def test_a_limit_above_the_norm_changes_no_bit(where: str, cut: str) -> None:
    def program(world: World) -> Any:
        engine = world.engine(net())
        engine.step(world.parts(batches(1)[0]))
        return engine.full_state_dict(), engine.last.grad_norm

    free, loose, endless = (on_ranks(program, where, cut=cut, clip=clip) for clip in (None, 1e6, math.inf))
    assert_same(loose, endless)
    assert free[0][1] is None and loose[0][1] > 0
    assert_same([state for state, _ in free], [state for state, _ in loose])


@pytest.mark.parametrize("where", ["ddp", "zero3"])
def test_frozen_and_unused_parameters_are_not_in_the_norm(where: str) -> None:
    template: Any = net()
    template.first.requires_grad_(False)
    template.register_parameter("unused", nn.Parameter(torch.ones(50, dtype=torch.float64)))

    def program(world: World) -> Any:
        engine = world.engine(template, sgd, clip=0.5)
        return [(step(engine, world.part(batch)), engine.last.grad_norm) for batch in batches()]

    check(program, where)


@pytest.mark.parametrize("where", ["ddp", "zero3", "hsdp"])
def test_what_a_listener_changes_is_in_the_norm(where: str) -> None:
    def louder(event: str, engine: Engine) -> None:
        for piece in engine.placed.owned if event == "reduced" else ():
            if piece.name == "head.weight":
                piece.gradient.mul_(20)

    def program(world: World) -> Any:
        engine = world.engine(net(), sgd, clip=0.5, **({"listener": louder} if world.comm else {}))
        if not world.comm:
            engine.model.head.weight.register_hook(lambda gradient: gradient * 20)
        return step(engine, world.part(batches(1)[0])), engine.last.grad_norm, engine.full_state_dict()

    check(program, where)


def test_the_norm_is_summed_in_fp64_and_rounded_once() -> None:
    """A million small squares beside a large one vanish in an fp32 sum, not in this one."""

    run = lambda m, x_BC: 0.5 + x_BC[:, :1] * 0 + m.small.sum() * 0.001 + m.large * 4096  # noqa: E731
    wide = cases.Made(run, small=nn.Parameter(torch.zeros(1 << 20)), large=nn.Parameter(torch.zeros(1)))

    def loss(model: nn.Module, batch: cases.Batch) -> Tensor:
        return model(batch["x"].float()).sum() * batch["mask"].sum().float() / batch["mask"].numel()

    (norm,) = train(wide, "shard=1", "ddp", batches(1), loss=loss, clip=math.inf)[0].norms
    exact = math.sqrt((1 << 20) * torch.tensor(0.001).double().item() ** 2 + 4096.0**2)
    assert norm == pytest.approx(exact, rel=1e-6) and norm != 4096.0
    assert torch.tensor(norm).item() == norm, "a number that fp32 can hold"
