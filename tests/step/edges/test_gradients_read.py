"""Gradients between backward and step: clipped by the engine, and never read as if there were none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edge_cases import (
    COPIES,
    EVERY,
    MESHES,
    alone,
    data_for,
    model_for,
    on_ranks,
    same,
    step,
)
from engine_cases import batches, count, loss_sum
from torch import nn


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("mesh", MESHES)
def test_clipping_in_a_loop(row: str, mesh: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> list[float]:
        norms = []
        for batch in map(part, data):
            for _ in range(2):
                engine.backward(loss_sum(model, batch), count(batch))
            norms.append(engine.reduce(clip=0.1).grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return norms

    wanted, truth = alone(program, model_for(row))
    for norms, state in on_ranks(program, model_for(row), mesh, row):
        assert norms == pytest.approx(wanted, rel=0.05 if row in COPIES else 1e-11)
        assert same(state, truth, row)


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize(
    "read",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1.0),
        lambda parameters: torch.nn.utils.get_total_norm([p.grad for p in parameters]),
        lambda parameters: [p.grad.norm() for p in parameters],
        lambda parameters: [p.grad.mul_(0.5) for p in parameters if p.grad is not None],
        lambda parameters: nn.ParameterList(parameters).zero_grad(set_to_none=False),
    ],
)
def test_gradients_that_are_read_between_backward_and_step_are_refused(row: str, read: Any) -> None:
    """The model's, and those of the pieces that the optimizer has."""
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            for _ in range(2):
                engine.backward(loss_sum(model, batch), count(batch))
                pieces = [p for group in optimizer.param_groups for p in group["params"]]
                for parameters in (list(model.parameters()), pieces):
                    with pytest.raises(ValueError, match=r"reads p\.grad.*engine\.reduce"):
                        read(parameters)
            optimizer.step()
            assert all(p.grad is None for p in model.parameters())
            read(pieces)  # behind a step they have theirs, as in plain PyTorch

    on_ranks(program, model_for(row), "shard=2", row)


def test_what_clipping_refuses() -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        batch = part(batches(1)[0])
        with pytest.raises(ValueError, match="without a backward"):
            engine.reduce(clip=1.0)
        engine.backward(loss_sum(model, batch), count(batch))
        engine.reduce(clip=1.0)
        with pytest.raises(ValueError, match="a second time"):
            engine.reduce(clip=1.0)
        with pytest.raises(ValueError, match="after the last backward"):
            engine.backward(loss_sum(model, batch), count(batch))
        optimizer.step()

    on_ranks(program, model_for("zero3"), "shard=2", "zero3")


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("then", ["backward", "clip", "step"])
@pytest.mark.parametrize("how", ["cleared", "replaced", "cleared in a piece"])
def test_gradients_that_are_taken_away_are_refused(row: str, then: str, how: str) -> None:
    """``model.zero_grad()`` would not discard what the engine has summed, nor would another gradient be used."""
    data = data_for(row, batches(2))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        first, second = map(part, data)
        engine.backward(loss_sum(model, first), count(first))
        before = engine.full_state_dict()
        if how == "cleared":
            model.zero_grad()
        elif how == "cleared in a piece":
            optimizer.param_groups[0]["params"][0].grad = None
        else:
            model.head.weight.grad = torch.zeros_like(model.head.weight)
        with pytest.raises(ValueError, match=r"was cleared or replaced.*optimizer\.zero_grad"):
            if then == "backward":
                engine.backward(loss_sum(model, second), count(second))
            elif then == "clip":
                engine.reduce(clip=1.0)
            else:
                optimizer.step()
        assert same(engine.full_state_dict(), before, "ddp")
        optimizer.zero_grad()
        step(model, optimizer, engine, second)

    _, truth = alone(lambda m, o, e, part, share: step(m, o, e, part(data[1])), model_for(row))
    for _, state in on_ranks(program, model_for(row), "shard=2", row):
        assert same(state, truth, row)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_a_step_of_the_engine_after_a_backward_of_ones_own(row: str) -> None:
    """What the backward left behind is gone, ``p.grad`` too."""

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        first, second = map(part, batches(2))
        engine.backward(loss_sum(model, first), count(first))
        engine.step([second])

    _, truth = alone(lambda m, o, e, part, share: step(m, o, e, part(batches(2)[1])), model_for(row))
    for _, state in on_ranks(program, model_for(row), "shard=2", row, loss_fn=loss_sum, count_fn=count):
        assert same(state, truth, row)


@pytest.mark.parametrize("row", EVERY)
def test_a_hook_that_would_come_too_late_is_refused(row: str) -> None:
    """It would see None; when it is gone, training goes on."""

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, batches(2)):
            step(model, optimizer, engine, batch)

    def late(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        program(model, optimizer, engine, part, share)
        handle = model.head.weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[union-attr]
        with pytest.raises(
            ValueError, match=r"on 'head\.weight' by register_post_accumulate_grad_hook after its Engine"
        ):
            step(model, optimizer, engine, part(batches(1)[0]))
        handle.remove()
        optimizer.zero_grad()
        step(model, optimizer, engine, part(batches(1)[0]))

    on_ranks(late, model_for(row), "shard=2", row)
