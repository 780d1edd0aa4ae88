"""Parameters read and written beside a forward: right under every row, or refused by name before an update."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from edge_cases import COPIES, EVERY, MESHES, SPLIT, WHOLE, alone, data_for, model_for, on_ranks, same
from engine_cases import batches, count, loss_sum
from torch import Tensor, nn


def step(model: nn.Module, optimizer: Any, engine: Any, batch: Any) -> None:
    engine.backward(loss_sum(model, batch), count(batch))
    optimizer.step()


def evaluated(model: nn.Module, batch: Any) -> float:
    with torch.no_grad():
        return loss_sum(model, batch | {"x": batch["x"].to(next(model.parameters()).dtype)}).item()


# ---- read ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("place", ["before the forward", "behind the forward"])
def test_a_penalty_on_parameters(row: str, mesh: str, place: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> list[float]:
        losses = []
        for batch in map(part, data):
            loss = loss_sum(model, batch) if place.startswith("behind") else torch.zeros(())
            with engine.gathered():
                penalty = sum(p.square().sum() for p in model.parameters())
            loss = loss + (loss_sum(model, batch) if place.startswith("before") else 0) + share * 3 * penalty
            losses.append(penalty.item())
            engine.backward(loss, count(batch))
            optimizer.step()
        return losses

    penalties, truth = alone(program, model_for(row))
    for seen, state in on_ranks(program, model_for(row), mesh, row):
        assert same(state, truth, row)
        assert seen == pytest.approx(penalties, rel=0.02 if row in COPIES else 1e-12)


@pytest.mark.parametrize("row", SPLIT)
@pytest.mark.parametrize(
    "read",
    [
        lambda m: sum(p.square().sum() for p in m.parameters()),
        lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
        lambda m: torch._foreach_norm(list(m.parameters())),  # type: ignore[attr-defined]
        lambda m: m.head.weight.data.norm(),
        lambda m: f"{m.scale:.3f}",
        lambda m: m.head.weight.tolist(),
        lambda m: m.head.weight.numpy(force=True),
        lambda m: m.head.weight.half(),
        lambda m: m.float(),
        lambda m: m.state_dict(),
        lambda m: torch.save(m, io.BytesIO()),
        lambda m: copy.deepcopy(m),
        lambda m: copy.deepcopy(m.head),
        lambda m: nn.init.zeros_(m.head.weight),
        lambda m: m.head.weight.data.fill_(1),
        lambda m: setattr(m.head.weight, "data", torch.zeros(3, 5).double()),
        lambda m: torch.nn.utils.vector_to_parameters(torch.zeros(1000).double(), m.parameters()),
        lambda m: m.load_state_dict(model_for("ddp").state_dict()),
    ],
)
def test_at_rest_nothing_is_read_or_written_in_silence(row: str, read: Any) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for _ in range(2):
            before = engine.full_state_dict()
            with pytest.raises((ValueError, RuntimeError), match=r"parameter '.*' is used by .* at rest(.|\n)*gathered"):
                read(model)
            assert same(engine.full_state_dict(), before, "ddp")
            step(model, optimizer, engine, part(data_for(row, batches(1))[0]))

    on_ranks(program, model_for(row), "shard=2", row)


def test_at_rest_metadata_is_answered() -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        weight = model.head.weight
        assert isinstance(weight, nn.Parameter) and weight.shape == (3, 5) and weight.dtype == torch.float64
        assert weight.numel() == 15 and weight.device.type == "cpu" and weight.requires_grad and weight.is_leaf
        assert weight.grad is None and len(weight) == 3 and weight.type() == "torch.DoubleTensor"
        assert torch.zeros_like(weight).sum() == 0 and "head.weight" in repr(weight)
        assert sum(p.numel() for p in model.parameters()) == engine.num_parameters

    on_ranks(program, model_for("zero3"), "shard=2", "zero3")


@pytest.mark.parametrize("row", EVERY)
def test_a_state_dict_taken_inside_outlives_the_block(row: str) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        step(model, optimizer, engine, part(data_for(row, batches(1))[0]))
        whole = engine.full_state_dict()
        with engine.gathered():
            state = model.state_dict()
            norm = model.head.weight.norm()
        for name, value in whole.items():
            assert torch.equal(state[name], value.to(state[name].dtype)), name
        assert norm == state["head.weight"].norm()
        held = {name: value.clone() for name, value in state.items()}
        step(model, optimizer, engine, part(data_for(row, batches(1))[0]))
        if row in SPLIT:
            assert all(torch.equal(state[name], held[name]) for name in held), "they were left this memory"

    on_ranks(program, model_for(row), "shard=2", row)


@pytest.mark.parametrize("row", EVERY)
def test_the_model_runs_inside_the_block(row: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            with engine.gathered("blocks.0", "head.weight"):
                with torch.no_grad():
                    loss_sum(model, batch)
                loss = loss_sum(model, batch) + share * model.blocks[0].up.weight.abs().sum()
                engine.backward(loss, count(batch))
            optimizer.step()

    _, truth = alone(program, model_for(row))
    for _, state in on_ranks(program, model_for(row), "shard=3", row):
        assert same(state, truth, row)


@pytest.mark.parametrize("row", ["ddp", "zero3", "hpz"])
def test_what_gathered_refuses(row: str) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        batch = part(batches(1)[0])
        with pytest.raises(ValueError, match=r"no parameter or module 'haed\.weight'; the nearest.*head\.weight"):
            with engine.gathered("haed.weight"):
                pass
        with pytest.raises(ValueError, match=r"'head\.weight' was written to inside.*modify=True"):
            with engine.gathered("head"), torch.no_grad():
                model.head.weight.mul_(2)
        with pytest.raises(ValueError, match=r"'head\.weight' was written to inside.*modify=True"):
            with engine.gathered("head"):
                model.head.weight.data = torch.zeros(3, 5).double()
        engine.backward(loss_sum(model, batch), count(batch))
        with pytest.raises(ValueError, match="in the middle of a step"):
            with engine.gathered(modify=True):
                pass
        with engine.gathered(), pytest.raises(ValueError, match="leave the block first"):
            optimizer.step()
        optimizer.step()

    on_ranks(program, model_for(row), "shard=2", row)


# ---- written ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", ["in place", "p.data in place", "p.data replaced", "as one vector"])
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


def write(model: nn.Module, how: str) -> None:
    """Clamp the parameters."""
    if how == "as one vector":
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector.clamp(-0.2, 0.2), model.parameters())
        return
    for parameter in model.parameters():
        if how == "in place":
            with torch.no_grad():
                parameter.clamp_(-0.2, 0.2)
        elif how == "p.data in place":
            parameter.data.clamp_(-0.2, 0.2)
        else:
            parameter.data = parameter.data.clamp(-0.2, 0.2)


@pytest.mark.parametrize("row", WHOLE)
@pytest.mark.parametrize("how", ["in place", "p.data in place", "p.data replaced", "as one vector", "loaded", "strides"])
def test_whole_parameters_may_be_written_between_steps(row: str, how: str) -> None:
    """Also where the optimizer has a copy of them, and also by other memory."""
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

    with pytest.raises(ValueError, match=r"p\.data of parameter '.*' was replaced by float16"):
        on_ranks(program, model_for(row), "shard=2", row)


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3@cpu"])
def test_ranks_that_write_different_values_are_refused(row: str) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        with engine.gathered("head", modify=True):
            model.head.bias.data += part({"x": torch.arange(2.0)})["x"].sum()

    with pytest.raises(ValueError, match=r"written different values to 1 parameters \(head\.bias\)"):
        on_ranks(program, model_for(row), "shard=2", row)


# ---- written in a forward --------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("how", ["in place", "p.data in place", "p.data replaced"])
def test_a_parameter_that_its_forward_writes(row: str, how: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            step(model, optimizer, engine, batch)

    template = clamped(row, how)
    if row in SPLIT:
        with pytest.raises(ValueError, match=r"(up\.(weight|bias)' was written to|p\.data is replaced)(.|\n)*modify=True"):
            on_ranks(program, template, "shard=2", row)
        return
    _, truth = alone(program, template)
    for _, state in on_ranks(program, template, "shard=2", row):
        assert same(state, truth, row)


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("how", ["in place", "p.data in place", "p.data replaced"])
@pytest.mark.parametrize("mesh", ["shard=1", "shard=2"])
def test_a_parameter_that_a_recomputed_block_writes_is_refused(row: str, how: str, mesh: str) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        step(model, optimizer, engine, part(data_for(row, batches(1))[0]))

    with pytest.raises(ValueError, match=r"block 'blocks\.0' writes to its|written to|p\.data is replaced"):
        on_ranks(program, clamped(row, how), mesh, row, recompute="full")


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("mesh", MESHES)
def test_clipping_in_a_loop(row: str, mesh: str) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> list[float]:
        norms = []
        for batch in map(part, data):
            for _ in range(2):
                engine.backward(loss_sum(model, batch), count(batch))
            norms.append(engine.clip_grad_norm_(0.1).item())
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
        lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1.0),
        lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]),
        lambda m: [p.grad.norm() for p in m.parameters()],
        lambda m: [p.grad.mul_(0.5) for p in m.parameters()],
        lambda m: m.zero_grad(set_to_none=False),
    ],
)
def test_gradients_that_are_read_between_backward_and_step_are_refused(row: str, read: Any) -> None:
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            for _ in range(2):
                engine.backward(loss_sum(model, batch), count(batch))
                with pytest.raises(ValueError, match=r"reads p\.grad.*engine\.clip_grad_norm_"):
                    read(model)
            optimizer.step()
            assert all(p.grad is None for p in model.parameters())

    on_ranks(program, model_for(row), "shard=2", row)


def test_what_clipping_refuses() -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        batch = part(batches(1)[0])
        with pytest.raises(ValueError, match="without a backward"):
            engine.clip_grad_norm_(1.0)
        engine.backward(loss_sum(model, batch), count(batch))
        engine.clip_grad_norm_(1.0)
        with pytest.raises(ValueError, match="a second time"):
            engine.clip_grad_norm_(1.0)
        with pytest.raises(ValueError, match="behind the last backward"):
            engine.backward(loss_sum(model, batch), count(batch))
        optimizer.step()

    def twice(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        engine.clip_grad_norm_(1.0)

    on_ranks(program, model_for("zero3"), "shard=2", "zero3")
    with pytest.raises(ValueError, match=r"clip=2\.0: leave one"):
        on_ranks(twice, model_for("zero3"), "shard=2", "zero3", clip=2.0)


# ---- copies and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", WHOLE)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
def test_a_driven_model_is_not_copied(row: str, copied: Any) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for what in (model, engine):
            with pytest.raises(ValueError, match=r"cannot be copied or pickled.*full_state_dict"):
                copied(what)

    on_ranks(program, model_for(row), "shard=2", row)


# ---- outputs that are parameters -------------------------------------------------------------------------------------


class Latents(nn.Module):
    """Learned queries, as in Perceiver: the unit's output is its own parameter, seen from another side."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.queries, self.how = nn.Parameter(torch.randn(3, 5).double()), how

    def forward(self, size: int) -> Any:
        if self.how == "expanded":
            return self.queries.expand(size, -1, -1)
        if self.how == "in a dict":
            return {"queries": (self.queries[None], size)}
        return {"itself": self.queries, "detached": self.queries.detach(), "transposed": self.queries.t().t()}[self.how]


class Perceiver(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.latents, self.how = Latents(how), how
        self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        queries = self.latents(len(x))
        if self.how == "in a dict":
            queries = queries["queries"][0]
        return (torch.tanh(self.first(x)[:, None] * queries) + queries.square()).sum(1) @ self.second.weight.new_ones(5, 5)


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", ["itself", "expanded", "detached", "transposed", "in a dict"])
def test_a_unit_returns_its_own_parameter(row: str, mesh: str, how: str) -> None:
    torch.manual_seed(0)
    template = Perceiver(how)
    if row.endswith("bf16"):
        template = template.float()
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            engine.backward(0.01 * (loss_sum(model, batch)), count(batch))
            optimizer.step()

    _, truth = alone(program, template)
    for _, state in on_ranks(program, template, mesh, row):
        assert same(state, truth, row)


@pytest.mark.parametrize("row", EVERY)
def test_an_output_that_is_written_to_in_place(row: str) -> None:
    """``nn.Linear`` returns a view where its input has three dims; writing to it makes autograd redraw its history."""

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x[:, None].expand(-1, 3, -1))
            hidden[:, 0] = 0
            return self.second(torch.tanh(hidden)).sum(1)

    template = Masking().float() if row.endswith("bf16") else Masking()
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for batch in map(part, data):
            engine.backward(0.01 * loss_sum(model, batch), count(batch))
            optimizer.step()

    _, truth = alone(program, template)
    for _, state in on_ranks(program, template, "shard=2", row):
        assert same(state, truth, row)
