"""Parameters that are frozen between steps and thawed again, and groups that an optimizer gets later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
from engine_cases import adamw, batches, count, deal, loss_sum
from loop_cases import ALONE, LAYOUTS, layout
from tensor_models import model as tensor_model
from tensor_models import token_batches
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


def chain() -> nn.Module:
    return cases.distinct(nn.Sequential(*(cases.Block() for _ in range(4))))


Freeze = Callable[[str], bool]
PATTERNS: dict[str, Freeze] = {
    "whole blocks": lambda name: name.startswith(("0.", "2.")),
    "weights of a block": lambda name: name.startswith("1.") and name.endswith("weight"),
    "before a linear that trains": lambda name: "norm" in name or "up" in name,
    "all but the first": lambda name: not name.startswith("0."),
    "all but the last": lambda name: not name.startswith("3."),
}
"""Which parameters are frozen in the second and third of five steps."""


def set_frozen(model: nn.Module, frozen: Freeze, step: int) -> None:
    if step == 1:
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen(name))
    if step == 3:
        model.requires_grad_(True)


def plain(template: nn.Module, frozen: Freeze, data: list[cases.Batch]) -> tuple[list[float], dict[str, Any]]:
    model, losses = copy.deepcopy(template), []
    optimizer = adamw(model.parameters())
    for step, batch in enumerate(data):
        set_frozen(model, frozen, step)
        optimizer.zero_grad()
        loss = loss_sum(model, batch) / count(batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("where", LAYOUTS)
def test_it_is_the_plain_run(where: str, pattern: str) -> None:
    """A frozen parameter keeps its values, and its optimizer's state too: momentum and decay wait."""
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        model = chain()
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_sum, count_fn=count)
        losses = []
        for step, batch in enumerate(batches(5)):
            set_frozen(model, PATTERNS[pattern], step)
            losses.append(engine.step(deal(batch, comm.mesh, comm.rank, 2)).loss)
        return losses, engine.full_state_dict()

    losses, state = plain(chain(), PATTERNS[pattern], batches(5))
    for ours, mine in run(mesh, body, deadline=20):
        assert ours == pytest.approx(losses, rel=1e-11)
        assert all(cases.close(mine[name], value) for name, value in state.items())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("where", ALONE)
def test_in_a_loop_of_ones_own_too(where: str, pattern: str, mode: str) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> Any:
        model = chain().train(mode == "train")
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        losses = []
        for step, batch in enumerate(batches(5)):
            set_frozen(model, PATTERNS[pattern], step)
            for part in deal(batch, comm.mesh, comm.rank, 2):
                engine.backward(loss_sum(model, part), count(part))
            optimizer.step()
            losses.append(engine.last.loss)
        return losses, engine.full_state_dict()

    losses, state = plain(chain(), PATTERNS[pattern], batches(5))
    for ours, mine in run(mesh, body, deadline=20):
        assert ours == pytest.approx(losses, rel=1e-11)
        assert all(cases.close(mine[name], value) for name, value in state.items())


@pytest.mark.parametrize("schedule", ["zb_h1", "zbv", "interleaved"])
def test_under_other_schedules(schedule: str) -> None:
    """Weight gradients in passes of their own, and two stages on a rank that share a weight."""

    linears = [nn.Linear(5, 5) for _ in range(4)]
    linears[3].weight = linears[0].weight
    template = cases.distinct(nn.Sequential(*(nn.Sequential(linear, nn.Tanh()) for linear in linears)))

    def frozen(name: str) -> bool:
        return name in ("0.0.weight", "2.0.weight", "1.0.bias")

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(template)
        engine = Engine(
            model,
            comm,
            strategy="ddp",
            schedule=schedule,
            optimizer=adamw(model.parameters()),
            loss_fn=loss_sum,
            count_fn=count,
        )
        for step, batch in enumerate(batches(5)):
            set_frozen(model, frozen, step)
            engine.step(deal(batch, comm.mesh, comm.rank, 4))
        return engine.full_state_dict()

    _, state = plain(template, frozen, batches(5))
    for mine in run(Mesh(pipe=2), body, deadline=20):
        assert all(cases.close(mine[name], value) for name, value in state.items())


def test_under_the_tensor_axis() -> None:
    def frozen(name: str) -> bool:
        return "qkv" in name or "down" in name or name == "embed.weight"

    def body(comm: Comm) -> Any:
        model = tensor_model(0.0)
        engine = Engine(
            model, comm, strategy="zero3", optimizer=adamw(model.parameters()), loss_fn=loss_sum, count_fn=count
        )
        for step, batch in enumerate(token_batches(5)):
            set_frozen(model, frozen, step)
            engine.step(deal(batch, comm.mesh, comm.rank, 1))
        return engine.full_state_dict()

    _, state = plain(tensor_model(0.0), frozen, token_batches(5))
    for mine in run(Mesh.parse("shard=2 tensor=2"), body, deadline=20):
        assert all(cases.close(mine[name], value, 1e-9) for name, value in state.items())


@pytest.mark.parametrize("where", ALONE)
def test_a_critic_is_frozen_in_each_generator_step(where: str) -> None:
    """The loop of every GAN: the generator's loss goes through a critic whose parameters want no gradient."""
    mesh, row = layout(where)

    def rounds(generator: Any, critic: Any, opt_g: Any, opt_c: Any, back_g: Any, back_c: Any, data: Any) -> None:
        for batch in data:
            critic.requires_grad_(True)
            loss = (critic(batch["x"]) - 1).square().sum() + critic(generator(batch["x"]).detach()).square().sum()
            back_c(loss, 2 * batch["x"].numel())
            opt_c.step()
            critic.requires_grad_(False)
            back_g((critic(generator(batch["x"])) - 1).square().sum(), batch["x"].numel())
            opt_g.step()

    generator, critic = chain(), cases.distinct(nn.Sequential(*(cases.Block() for _ in range(3))), seed=1)

    def body(comm: Comm) -> Any:
        models = [copy.deepcopy(generator), copy.deepcopy(critic)]
        optimizers = [adamw(m.parameters()) for m in models]
        engines = [Engine(m, comm, strategy=row, optimizer=o) for m, o in zip(models, optimizers, strict=True)]
        data = [deal(batch, comm.mesh, comm.rank, 1)[0] for batch in batches(3)]
        rounds(*models, *optimizers, *(engine.backward for engine in engines), data)
        return [engine.full_state_dict() for engine in engines]

    def backward_of(model: nn.Module) -> Any:
        def backward(loss: Any, terms: int) -> None:
            model.zero_grad()
            (loss / terms).backward()

        return backward

    models = [copy.deepcopy(generator), copy.deepcopy(critic)]
    optimizers = [adamw(m.parameters()) for m in models]
    rounds(*models, *optimizers, *map(backward_of, models), batches(3))
    for states in run(mesh, body, deadline=20):
        for state, model in zip(states, models, strict=True):
            assert all(cases.close(state[name], value) for name, value in model.state_dict().items())


# ---- groups that come later --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", LAYOUTS)
def test_a_group_that_is_added_later_is_refused(where: str) -> None:
    """Its parameters would not train."""
    mesh, row = layout(where)

    def body(comm: Comm) -> None:
        model: Any = chain()
        optimizer = adamw(model[3].parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_sum, count_fn=count)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.003})
        engine.step(deal(batches(1)[0], comm.mesh, comm.rank, 1))

    with pytest.raises(ValueError, match=r"group was added to AdamW after its Engine.*build all groups first"):
        run(mesh, body, deadline=20)


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", LAYOUTS)
def test_what_was_frozen_when_it_was_placed_cannot_be_thawed(where: str) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> None:
        model = chain()
        model[1].requires_grad_(False)  # type: ignore[index]
        engine = Engine(
            model, comm, strategy=row, optimizer=adamw(model.parameters()), loss_fn=loss_sum, count_fn=count
        )
        engine.step(deal(batches(1)[0], comm.mesh, comm.rank, 2))
        model.requires_grad_(True)
        engine.step(deal(batches(1)[0], comm.mesh, comm.rank, 2))

    with pytest.raises(ValueError, match=r"parameter '1\.norm\.weight' was thawed.*freeze it afterwards"):
        run(mesh, body, deadline=20)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("where", ["ddp", "zero1", "zero2"])
def test_ranks_that_freeze_different_parameters_are_told(where: str, own: bool) -> None:
    mesh, row = layout(where)

    def body(comm: Comm) -> None:
        model = chain()
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_sum, count_fn=count)
        if comm.rank == 1:
            model[2].requires_grad_(False)  # type: ignore[index]
        (part,) = deal(batches(1)[0], comm.mesh, comm.rank, 1)
        if own:
            engine.backward(loss_sum(model, part), count(part))
            optimizer.step()
        else:
            engine.step([part])

    with pytest.raises(ValueError, match=r"ranks train different parameters: .* is none on rank.*, 2\.norm\.weight, "):
        run(mesh, body, deadline=20)
