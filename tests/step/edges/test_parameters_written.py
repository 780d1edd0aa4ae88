"""Parameters written beside a forward or in one: kept under every row, or refused by name before an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edge_cases import (
    COPIES,
    EVERY,
    MESHES,
    SPLIT,
    WAYS,
    WHOLE,
    alone,
    data_for,
    evaluated,
    model_for,
    on_ranks,
    same,
    step,
    write,
)
from engine_cases import batches, count, loss_sum
from torch import Tensor, nn


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", WAYS)
def test_what_is_written_inside_of_gathered_is_kept(row: str, mesh: str, how: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            step(model, optimizer, engine, batch)
            with engine.gathered(modify=True):
                write(model, how)

    _, truth = alone(program, model_for(row))
    for _, state in on_ranks(program, model_for(row), mesh, row):
        assert same(state, truth, row)


@pytest.mark.parametrize("row", WHOLE)
@pytest.mark.parametrize("how", [*WAYS, "loaded", "strides"])
def test_whole_parameters_may_be_written_between_steps(row: str, how: str) -> None:
    """In place; by other memory, or where the optimizer has a copy of them, it is refused."""
    data = data_for(row, batches(4))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> list[float]:
        losses = []
        for batch in map(part, data):
            step(model, optimizer, engine, batch)
            if how == "loaded":
                model.load_state_dict({n: v * 0.5 for n, v in model.state_dict().items()})
            elif how == "strides":
                model.first.weight.data = model.first.weight.data.t()
            else:
                write(model, how)
            losses.append(evaluated(model, data[0]))
        return losses

    if row in COPIES or how in ("p.data replaced", "as one vector", "strides"):
        with pytest.raises(ValueError, match=r"(was written to between two steps.*modify=True|was replaced: forwards)"):
            on_ranks(program, model_for(row), "shard=2", row)
        return
    truth_losses, truth = alone(program, model_for(row))
    for losses, state in on_ranks(program, model_for(row), "shard=2", row):
        assert same(state, truth, row)
        assert losses == pytest.approx(truth_losses, rel=0.1 if row in COPIES else 1e-11)


@pytest.mark.parametrize("row", WHOLE)
def test_weights_swapped_for_an_evaluation_come_back(row: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> list[float]:
        average = {n: p.detach().clone() for n, p in model.named_parameters()}
        losses = []
        for batch in map(part, data):
            step(model, optimizer, engine, batch)
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.1)
            own = {n: p.data for n, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.data = average[name]
            losses.append(evaluated(model, data[0]))
            for name, p in model.named_parameters():
                p.data = own[name]
        return losses

    truth_losses, truth = alone(program, model_for(row))
    for losses, state in on_ranks(program, model_for(row), "shard=2", row):
        assert same(state, truth, row)
        assert losses == pytest.approx(truth_losses, rel=0.1 if row in COPIES else 1e-11)


@pytest.mark.parametrize("row", WHOLE)
def test_values_of_another_dtype_are_refused(row: str) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        model.half()
        batch = {key: value.half() for key, value in part(batches(1)[0]).items()}
        engine.backward(loss_sum(model, batch), count(batch))
        optimizer.step()

    with pytest.raises(ValueError, match=r"p\.data of parameter '.*' was replaced: forwards"):
        on_ranks(program, model_for(row), "shard=2", row)


@pytest.mark.parametrize("row", COPIES)
def test_what_nobody_wrote_keeps_its_bits(row: str) -> None:
    """The optimizer's copy has more of them than the parameters, where these are in 16 bits."""

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        step(model, optimizer, engine, part(data_for(row, batches(1))[0]))
        before = engine.full_state_dict()
        with engine.gathered(modify=True), torch.no_grad():
            model.head.bias[0] = 2
        after = engine.full_state_dict()
        before["head.bias"][0] = 2
        assert all(torch.equal(after[name], before[name]) for name in before)

    on_ranks(program, model_for(row), "shard=2", row)


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3@cpu"])
def test_ranks_that_write_different_values_are_refused(row: str) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        with engine.gathered("head", modify=True):
            model.head.bias.data += part({"x": torch.arange(2.0)})["x"].sum()

    with pytest.raises(ValueError, match=r"written different values to 1 parameters \(head\.bias\)"):
        on_ranks(program, model_for(row), "shard=2", row)


class Clamped(nn.Linear):
    """A linear that keeps its weights small by itself."""

    how = "in place"

    def forward(self, x: Tensor) -> Tensor:
        write(self, self.how)
        return super().forward(x)


def clamped(row: str, how: str) -> nn.Module:
    model = model_for(row)
    for block in model.blocks:
        block.up.__class__ = type("Clamped", (Clamped,), {"how": how})
    return model


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("how", WAYS[:3])
def test_a_parameter_that_its_forward_writes(row: str, how: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            step(model, optimizer, engine, batch)

    template = clamped(row, how)
    if row in SPLIT:
        with pytest.raises(ValueError, match=r"(up\.(weight|bias)' was written to|p\.data is replaced).*modify=True"):
            on_ranks(program, template, "shard=2", row)
        return
    if row in COPIES or how == "p.data replaced":
        with pytest.raises(ValueError, match=r"(was written to in a forward.*modify=True|was replaced: forwards)"):
            on_ranks(program, template, "shard=2", row)
        return
    _, truth = alone(program, template)
    for _, state in on_ranks(program, template, "shard=2", row):
        assert same(state, truth, row)


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("how", WAYS[:3])
@pytest.mark.parametrize("mesh", ["shard=1", "shard=2"])
def test_a_parameter_that_a_recomputed_block_writes_is_refused(row: str, how: str, mesh: str) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        step(model, optimizer, engine, part(data_for(row, batches(1))[0]))

    with pytest.raises(ValueError, match=r"block 'blocks\.0' writes to its|written to|p\.data is replaced"):
        on_ranks(program, clamped(row, how), mesh, row, recompute="full")


class Router(nn.Linear):
    """Casts a module to the dtype that it has, in every forward, as the routers of Switch and NLLB do."""

    def forward(self, x: Tensor) -> Tensor:
        self.to(x.dtype)
        return super().forward(x)


class Routed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.inner.to(x.dtype)
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("row", EVERY)
def test_a_module_that_is_cast_to_its_own_dtype_in_a_forward_stays_what_it_is(row: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            step(model, optimizer, engine, batch)

    template = model_for(row)
    for block in template.blocks:
        block.up.__class__ = Router
        block.down = Routed(block.down)
    _, truth = alone(program, template)
    for _, state in on_ranks(program, template, "shard=3", row):
        assert same(state, truth, row)
