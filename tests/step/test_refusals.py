"""Mistakes of a loop: each row has a program, the words that refuse it, and the layouts on which it is tried."""

from collections.abc import Callable
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from engine_cases import adamw, batches, count, distinct, loss_sum
from programs import ALONE, PIPES, SPLIT, STAGES, Experts, World, chain, net, on_ranks, refused, step, update
from test_together import TERMS, Expert, critic, generator, score, two
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import plait

TABLE: dict[str, tuple[str, list[str], Callable[[World], Any]]] = {}


def refuses(words: str, layouts: list[str], *values: Any) -> Callable[[Any], Any]:
    """The program, with each of the values, raises a ValueError of these words."""

    def note(program: Any) -> Any:
        for value in values or (None,):
            name = program.__name__ + ("" if value is None else f" {getattr(value, '__name__', value)}")
            TABLE[name] = words, layouts, program if value is None else partial(program, value)
        return program

    return note


def backward(engine: Any, part: Any, **how: Any) -> None:
    engine.backward(loss_sum(engine.model, part), count(part), **how)


# ---- the order of calls ---------------------------------------------------------------------------------------------


@refuses("without a backward before it", ALONE, "reduce", "step", "step twice", "step after zero_grad")
def no_backward(how: str, world: World) -> None:
    engine = world.engine(net())
    if how == "step twice":
        step(engine, world.part(batches(1)[0]))
    elif how == "step after zero_grad":
        backward(engine, world.part(batches(1)[0]))
        engine.reduce()
        engine.optimizers[0].zero_grad()
    engine.reduce() if how == "reduce" else update(engine)


@refuses(r"without engine\.reduce\(\)", ALONE, 0, 1, 2)
def published_too_early(backwards: int, world: World) -> None:
    engine = world.engine(net())
    if backwards:
        backward(engine, world.part(batches(1)[0]))
    if backwards == 2:
        update(engine)
    engine.publish()


@refuses(r"reduce a second time in one step|engine\.backward after engine\.reduce", ALONE, "reduce", "backward")
def a_call_after_reduce(what: str, world: World) -> None:
    engine, part = world.engine(net()), world.part(batches(1)[0])
    backward(engine, part)
    engine.reduce(clip=1.0)
    engine.reduce() if what == "reduce" else backward(engine, part)


@refuses("engine.step after engine.backward drops its gradient", ALONE)
def a_step_of_the_engine_in_a_step_of_the_loop(world: World) -> None:
    engine = world.engine(net())
    backward(engine, world.part(batches(1)[0]))
    engine.step([world.part(batches(1)[0])])


@refuses("Were parameters updated", ALONE, "update", "load")
def a_backward_of_an_older_forward(what: str, world: World) -> None:
    engine, part = world.engine(net()), world.part(batches(1)[0])
    state, old = engine.full_state_dict(), loss_sum(engine.model, part)
    step(engine, part) if what == "update" else engine.load_full_state_dict(state)
    engine.backward(old, count(part))


@refuses(r"read after it was resharded: use w\.detach\(\)\.clone\(\) in place of w\.detach", SPLIT)
def a_detached_parameter_that_is_read_late(world: World) -> None:
    late = cases.Made(lambda m, x: F.linear(x, m.w.detach()).sin() + F.linear(x, m.w), w=nn.Parameter(torch.ones(5, 5)))
    step(world.engine(distinct(nn.Sequential(nn.Linear(5, 5), late))), world.part(batches(1)[0]))


@refuses(r"call engine\.backward\(loss, count\) instead of loss.backward", ALONE)
def torchs_own_backward(world: World) -> None:
    loss_sum(world.engine(net()).model, batches(1)[0]).backward()


@refuses(r"came outside of its engine's backward: .*also=\[engine\]", ALONE, 0, 1)
def an_engine_that_is_not_named(at: int, world: World) -> None:
    g, d = world.engine(generator()), world.engine(critic())
    for number, batch in enumerate(map(world.part, batches(2))):
        d.backward(score(d.model(batch["x"]), 1), 3)
        update(d)
        g.backward(score(d.model(g.model(batch["x"])), 1), 3, also=() if number == at else [d])
        update(g)
        d.optimizers[0].zero_grad()


@refuses(r"input part of a backward that the schedule splits.*pass parameter \* 1", PIPES)
def a_function_that_is_given_a_parameter(world: World) -> None:
    world.engine(chain(partial(nn.SyncBatchNorm, 5)), schedule="zb_h1").step(batches(2))


@refuses(r"call engine\.backward once", ALONE)
def a_graph_that_is_kept(world: World) -> None:
    backward(world.engine(net()), batches(1)[0], retain_graph=True)


@refuses(r"step\(closure\).*Run it first: loss = closure\(\); optimizer", ALONE, "positional", "keyword", "after one")
def a_closure(how: str, world: World) -> None:
    engine = world.engine(net())
    if how == "after one":
        backward(engine, world.part(batches(1)[0]))
    closure = lambda: torch.zeros(())  # noqa: E731
    given = {"closure": closure} if how == "keyword" else {}
    engine.optimizers[0].step(*() if given else (closure,), **given)


@refuses("leave the block first", ALONE)
def a_step_where_parameters_are_gathered(world: World) -> None:
    engine = world.engine(net())
    backward(engine, batches(1)[0])
    with engine.gathered():
        update(engine)


@refuses(r"AdamW has not stepped since the last backward", ALONE, "forgotten", "twice", "looked between")
def one_of_two_optimizers(wrong: str, world: World) -> None:
    engine = world.engine(net(), two)
    first, _ = engine.optimizers
    for _ in range(2):
        backward(engine, batches(1)[0])
        first.step()
        if wrong == "twice":
            first.step()
        if wrong == "looked between":
            with torch.no_grad():
                loss_sum(engine.model.eval(), batches(1)[0])


# ---- losses and counts ----------------------------------------------------------------------------------------------


@refuses("the loss needs no gradient", STAGES, "detached", "without a graph", "in a loop")
def a_loss_without_a_graph(how: str, world: World) -> None:
    def lost(model: nn.Module, batch: Any) -> Tensor:
        with torch.set_grad_enabled(how == "detached"):
            return loss_sum(model, batch).detach()

    engine = world.engine(chain(), loss_fn=lost)
    part = world.part(batches(1)[0])
    if how == "in a loop" and world.mesh.pipe == 1:
        engine.backward(lost(engine.model, part), count(part))
    engine.step([part])


@refuses(r"loss_fn and count_fn", STAGES, "loss_fn", "count_fn")
def a_step_without_functions(missing: str, world: World) -> None:
    world.engine(chain(), **{missing: None}).step(batches(1))


@refuses("no microbatch", STAGES)
def no_microbatch(world: World) -> None:
    world.engine(chain()).step([])


@refuses(r"different numbers of microbatches \(1, 2", ["ddp", "zero3", "pipe"])
def different_numbers_of_microbatches(world: World) -> None:
    world.engine(chain()).step(world.parts(batches(1)[0], 1 + world.rank))


@refuses("no target", STAGES)
def nothing_to_count(world: World) -> None:
    batch = batches(1)[0]
    world.engine(chain()).step(world.parts(batch | {"mask": batch["mask"] * 0}, 2))


@refuses("count of -3", STAGES)
def a_negative_count(world: World) -> None:
    """On one rank, which the others hear."""
    engine = world.engine(chain(), count_fn=lambda batch: -3 if batch["mask"][0] < 0 else count(batch))
    parts = world.parts(batches(1)[0], 2)
    parts[1]["mask"][:] = -1 if world.place == world.ranks - 1 else 1
    engine.step(parts)


@refuses("count of -2|lacks the number of terms of the loss", ALONE, "negative", "missing")
def a_count_in_a_loop(kind: str, world: World) -> None:
    engine = world.engine(net())
    engine.backward(loss_sum(engine.model, batches(1)[0]), *[-2] * (kind == "negative"))


MEANS = {
    "mse": lambda out: F.mse_loss(out, torch.zeros_like(out)),
    "cross entropy": lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long)),
    "half": lambda out: -out.square().mean().float() / 2,
    "two shares": lambda out: 0.9 * F.mse_loss(out, torch.zeros_like(out)) + 0.1 * out.square().mean(),
    "batchmean": lambda out: F.kl_div(out.log_softmax(1), out.detach().softmax(1), reduction="batchmean") * 1.5,
    "beside a sum": lambda out: out.square().sum() + 0.01 * out.mean(),
    "stacked": lambda out: torch.stack([out.square().mean(), 0.1 * out.mean()]).sum(),
    "nanmean": lambda out: out[:, 0].square().nanmean(),
    "of each feature": lambda out: out.square().mean(0).sum(),
    "weighted": lambda out: out.square().sum(1) @ torch.tensor([0.1, 0.2, 0.3, 0.4]).to(out),
}
SUMS = {
    "sum": lambda out: out.square().sum(),
    "cross entropy": lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long), reduction="sum"),
    "made a sum": lambda out: out.square().mean() * out.numel(),
    "zero": lambda out: out.sum() * 0.0 + out.mean() * 0.0,
    "half": lambda out: out.square().sum() / 2,
    "by features": lambda out: out.square().sum() / out.size(1),
    "stacked": lambda out: torch.stack([out.square().sum(), 0.5 * out.sum()]).sum(),
    "half of the count": lambda out: 0.5 * len(out) * out.square().mean(),
    "declared": lambda out: (0.3 * out.square().mean()).sum(),
    "of means of features": lambda out: out.square().mean(1).sum(),
    "a product times the count": lambda out: len(out) * (out.square().sum(1) @ torch.ones(4).to(out)),
    "a mean of each": lambda out: sum(F.l1_loss(row, 2 * row) for row in out),
}


def once(kind: Any, num: int, world: World, **how: Any) -> float:
    engine = world.engine(net())
    engine.backward(kind(engine.model(torch.ones(4, 5, dtype=torch.float64))), num, **how)
    update(engine)
    return engine.last.loss


@refuses(r'is a mean \(\w+( times -?[\d.]+)?\), and is taken as a sum of 4 terms.*reduction="mean"', ALONE, *MEANS)
def a_mean_given_as_a_sum(kind: str, world: World) -> None:
    once(MEANS[kind], 4, world)


@refuses(r"is a sum \(.*\), and is taken as a mean of 4 terms", ALONE, "sum", "cross entropy", "half", "stacked")
def a_sum_given_as_a_mean(kind: str, world: World) -> None:
    once(SUMS[kind], 4, world, reduction="mean")


@refuses("reduction='none'", ALONE)
def another_reduction(world: World) -> None:
    once(SUMS["sum"], 4, world, reduction="none")


@refuses(r"the loss (has shape \(\d+,\)|is a .*Backward0\).*plait\.sum_of_mean)", STAGES, "clone", "mean", "sum")
def a_loss_function_of_another_reduction(kind: str, world: World) -> None:
    def loss_fn(model: nn.Module, batch: cases.Batch) -> Tensor:
        return getattr(model(batch["x"]).sum(1), kind)()  # type: ignore[no-any-return]

    engine = world.engine(chain(), loss_fn=plait.sum_of_mean(loss_fn, count) if kind == "sum" else loss_fn)
    engine.step(world.parts(batches(1)[0], 2))


def test_a_mean_and_a_sum_may_be_said_to_be_so() -> None:
    """Each microbatch weighs the same: its mean is one term. Or it is said to be a sum."""

    def program(world: World) -> None:
        for kind in MEANS.values():
            said = [once(kind, 4, world, reduction=how) for how in ("sum", "mean")]
            assert once(kind, 1, world) == pytest.approx(4 * said[0]) == pytest.approx(said[1])
        for kind in SUMS.values():
            assert once(kind, 4, world) == once(kind, 4, world, reduction="sum")

    on_ranks(program, "zero1")
    with pytest.raises(TypeError, match=r'two functions.*reduction="mean"'):
        plait.sum_of_mean(torch.ones(()), 4)


# ---- models, optimizers ---------------------------------------------------------------------------------------------


@refuses(r"of '0' belongs to another stage", PIPES, *TERMS)
def terms_of_another_stage(way: Any, world: World) -> None:
    engine = world.engine(
        distinct(Experts(*(Expert() for _ in range(4)))),
        loss_fn=lambda model, batch: loss_sum(model, batch) + way(model),
    )
    engine.step(world.parts(batches(1)[0], 2))


@refuses(r"a trainable parameter of shape \(\) that is not the engine's", STAGES)
def a_parameter_that_no_engine_has(world: World) -> None:
    """A criterion that learns; a program that catches the error and goes on gets it again."""
    weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    engine = world.engine(chain(), loss_fn=lambda model, batch: loss_sum(model, batch) * torch.exp(-weight) + weight)
    if world.mesh.pipe == 1:
        with pytest.raises(ValueError, match="that is not the engine's"):
            engine.step(batches(1))
    engine.step(batches(1))


@refuses(r"group was added to AdamW after its Engine.*build all groups first", STAGES)
def a_group_that_is_added_later(world: World) -> None:
    engine = world.engine(chain(), lambda parameters: adamw(parameters[-6:]))
    engine.optimizers[0].add_param_group({"params": list(engine.model[2].parameters()), "lr": 0.003})
    engine.step(world.parts(batches(1)[0]))


@refuses(r"parameter '1\.norm\.weight' was thawed.*freeze it afterwards", STAGES)
def thawed_though_it_was_frozen_at_first(world: World) -> None:
    model = chain()
    model[1].requires_grad_(False)
    engine = world.engine(model)
    for _ in range(2):
        engine.step(world.parts(batches(1)[0], 2))
        engine.model.requires_grad_(True)


@refuses(r"train different parameters: .* is none on rank.*, 2\.norm\.weight, ", ["ddp", "zero1", "zero2"], True, False)
def frozen_on_one_rank(in_a_loop: bool, world: World) -> None:
    engine = world.engine(chain())
    if world.rank == 1:
        engine.model[2].requires_grad_(False)
    part = world.part(batches(1)[0])
    step(engine, part) if in_a_loop else engine.step([part])


@refuses("no optimizer, so no step would change anything", STAGES, "step", "backward")
def no_optimizer(how: str, world: World) -> None:
    engine = world.engine(chain(), None)
    adamw(engine.model.parameters())  # as FSDP2's users do
    engine.step(batches(1)) if world.mesh.pipe > 1 or how == "step" else backward(engine, batches(1)[0])


@refuses(r"call engine\.use\(optimizer\)", ["zero3", "ddp"])
def engine_step_with_pieces_alone(world: World) -> None:
    engine = world.engine(net(), None)
    adamw(engine.parameters())
    engine.step(world.parts(batches(1)[0]))


@refuses("has an optimizer already", ALONE)
def a_second_optimizer(world: World) -> None:
    engine = world.engine(net())
    engine.use(adamw(engine.model.parameters()))


@refuses(r"'head.weight' is in two optimizers, AdamW and AdamW", ALONE)
def a_parameter_in_two_optimizers(world: World) -> None:
    world.engine(net(), lambda parameters: [adamw(parameters), adamw(parameters[-2:])])


@refuses(r"LBFGS computes losses and gradients inside of its step\(closure\)", ALONE)
def an_optimizer_that_needs_a_closure(world: World) -> None:
    world.engine(chain(), torch.optim.LBFGS)


def on_meta() -> nn.Module:
    with plait.empty_parameters():
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()


@refuses(r"reads p\.grad, but after engine\.backward|while its unit is at rest", ALONE, chain, on_meta)
def an_optimizer_that_the_engine_was_not_given(make: Any, world: World) -> None:
    before: list[Any] = []
    engine = world.engine(make(), lambda parameters: before.append(adamw(parameters[2:])) or adamw(parameters[:2]))
    backward(engine, batches(1)[0])
    (before[0] if make is on_meta else adamw(engine.model[1].parameters())).step()


@pytest.mark.parametrize("given", [[object()], 3, {"a": "adamw"}])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"is no torch\.optim\.Optimizer"):
        on_ranks(lambda world: plait.Engine(net(), world.comm, optimizer=given), "none")


@refuses(r"parametrize\.cached\(\) has one cache for the process, and ranks are threads", ["ddp", "zero3", "pipe"])
def torchs_cache_of_parametrizations(world: World) -> None:
    engine = world.engine(chain(lambda: weight_norm(nn.Linear(5, 5))))
    with parametrize.cached():
        engine.step(world.parts(batches(1)[0]))


@refuses("1 values per channel on all ranks together", ["ddp"])
def one_value_for_a_norm(world: World) -> None:
    engine = world.engine(nn.SyncBatchNorm.convert_sync_batchnorm(distinct(nn.Sequential(nn.BatchNorm1d(5)))))
    engine.model(batches(1)[0]["x"][: 1 - world.rank])


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", TABLE)
def test_it_is_refused(name: str, turn: int) -> None:
    """On three layouts: the last one, and two of the others, each time others."""
    words, layouts, program = TABLE[name]
    others = layouts[list(TABLE).index(name) % 3 :: 5] or layouts
    refused(words, program, [layouts[-1], *others, *others][turn])
