"""NaN and inf of one rank are everybody's, before anything is updated; every element counts once in the norm."""

import math
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_world, same_as_plain
from engine_cases import batches, count, net, sgd, train
from programs import ALONE, STAGES, World, assert_same, chain, on_ranks, step, update
from torch import Tensor, nn

from plait.step import Engine


class Spoil(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.value, None


def spoiled(model: nn.Module, batch: cases.Batch) -> Tensor:
    """``batch["kind"]`` holds 0, or 1 for a bad loss, 2 for a bad gradient of a finite loss; then its value."""
    kind, value = batch["kind"][0].tolist()
    out = model(batch["x"])
    loss = ((Spoil.apply(out, value) if kind == 2 else out) - 0.5).square().sum()
    return loss * value if kind == 1 else loss


def trained(kind: int, value: float, how: str, bad: int | None, own: bool, world: World) -> Any:
    """Three steps, of which one is bad on the last data rank, in microbatch 1, or left out where there is no world."""
    engine, raised = world.engine(chain(), loss_fn=spoiled, clip=0.5, **{"nonfinite": how} if world.comm else {}), ""
    for number, batch in enumerate(batches(3)):
        batch["mask"][:] = 1
        parts = world.parts(batch, 2)
        for m, part in enumerate(parts):
            here = (number, m, world.place) == (bad, 1, world.ranks - 1)
            part["kind"] = torch.tensor([[kind, value] if here else [0.0, 0.0]] * len(part["x"]), dtype=torch.float64)
        if number == bad and not world.comm:
            continue
        before = engine.full_state_dict()
        try:
            if own:
                for part in parts:
                    engine.backward(spoiled(engine.model, part), count(part))
                update(engine)
            else:
                engine.step(parts)
        except FloatingPointError as error:
            raised = str(error)
        if number == bad:
            assert_same(engine.full_state_dict(), before)
            assert {float(one["step"]) for one in engine.optimizers[0].state.values()} <= {float(number)}
            assert raised or not engine.last.made
    return raised, engine.full_state_dict(), getattr(engine, "steps", None)


@pytest.mark.parametrize("where", STAGES)
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("how", ["raise", "skip", "raise in a loop", "skip in a loop"])
def test_nothing_has_changed_and_every_rank_can_say_whose_it_is(kind: int, how: str, where: str) -> None:
    value, own, what = (math.nan, math.inf)[kind - 1], "loop" in how and where in ALONE, how.split()[0]
    program = partial(trained, kind, value, what, 1, own)
    _, wanted, _ = program(World("none"))
    ranks = on_ranks(program, where)
    for raised, state, steps in ranks:
        assert_same(state, wanted, 1e-11)
        assert steps == (2 if what == "raise" else 3), "a skipped step's number is used up, as its batch is"
        assert raised.startswith("step 1 (counted from 0) is not finite: " if what == "raise" else "")
        assert bool(raised) == (what == "raise") and "microbatch 0" not in raised
        if raised and kind == 1:
            assert f"the loss of microbatch 1 on rank {len(ranks) - 1} is {value}" in raised
        elif raised:
            assert f"in microbatch 1 on rank {len(ranks) - 1}" in raised and "a gradient in the unit of '" in raised


class SpoiledWeight(nn.Linear):
    """The gradient of its weight is not finite where its input is large; what it hands back is."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, Spoil.apply(self.weight, math.inf if input.max() > 5 else 1.0))


@pytest.mark.parametrize("where", ["ddp", "zero1", "zero2", "zero3"])
@each_world()
def test_a_gradient_that_does_not_spread_is_named_too(world: World) -> None:
    model = cases.distinct(nn.Sequential(nn.Linear(5, 5), SpoiledWeight(5, 5), nn.Linear(5, 5)))
    engine = world.engine(model, loss_fn=lambda m, x: m(x).sum(), count_fn=len, bucket=0)
    with torch.no_grad(), engine.gathered(modify=True):
        engine.model[0].weight.copy_(torch.eye(5)), engine.model[0].bias.zero_()
    x = torch.ones(2, 5, dtype=torch.float64)
    place = "in microbatch 1" if world.where in ("zero2", "zero3") else "accumulated over the microbatches"
    with pytest.raises(FloatingPointError, match=f"a gradient in the unit of '1.weight' {place} on rank 0"):
        engine.step([x, x * 9, x])


@pytest.mark.parametrize("where", ["ddp", "zero1", "zero2", "zero3"])
@each_world()
def test_a_parameter_without_gradient_after_a_bad_step_is_still_good(world: World) -> None:
    """Its place in the buffer holds the bad step's number, which is never read again."""
    parts = {name: nn.Linear(5, 5, bias=False) for name in "ab"}
    either = cases.distinct(cases.Made(lambda m, x, b: m.b(x) if b else m.a(x), **parts))
    engine, made = world.engine(either, units=[], nonfinite="skip"), []
    for number in range(3):
        loss = engine.model(torch.ones(2, 5, dtype=torch.float64), b=number == 0).sum()
        engine.backward(loss * (1.0 if number else math.nan), 2)
        update(engine)
        made.append(engine.last.made)
    assert made == [False, True, True]


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
@same_as_plain()
def test_frozen_and_unused_parameters_are_not_in_the_norm(world: World) -> None:
    template: Any = net()
    template.first.requires_grad_(False)
    template.register_parameter("unused", nn.Parameter(torch.ones(50, dtype=torch.float64)))
    engine = world.engine(template, sgd, clip=0.5)
    return [(step(engine, world.part(batch)), engine.last.grad_norm) for batch in batches()]


@pytest.mark.parametrize("where", ["ddp", "zero3", "hsdp"])
@same_as_plain()
def test_what_a_listener_changes_is_in_the_norm(world: World) -> None:
    def louder(event: str, engine: Engine) -> None:
        for piece in engine.placed.owned if event == "reduced" else ():
            if piece.name == "head.weight":
                piece.gradient.mul_(20)

    engine = world.engine(net(), sgd, clip=0.5, **({"listener": louder} if world.comm else {}))
    if not world.comm:
        engine.model.head.weight.register_hook(lambda gradient: gradient * 20)
    return step(engine, world.part(batches(1)[0])), engine.last.grad_norm, engine.full_state_dict()


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
