"""Parameters read beside a forward: whole, or an error at the first operator; never NaN in silence."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from edge_cases import (
    COPIES,
    EVERY,
    MESHES,
    SPLIT,
    WHOLE,
    alone,
    data_for,
    model_for,
    on_ranks,
    same,
    step,
)
from engine_cases import batches, count, loss_sum
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


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
            with pytest.raises(
                (ValueError, RuntimeError), match=r"parameter '.*' is used by .* at rest(.|\n)*gathered"
            ):
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
        assert sum(p.numel() for p in model.parameters()) == engine.placed.num_parameters

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


@pytest.mark.parametrize("row", EVERY)
def test_a_norm_that_no_backward_follows(row: str) -> None:
    """It is made with a graph, as anything in grad mode; what is gathered for it is no longer so after the update."""
    data = data_for(row, batches(3))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> list[float]:
        norms = []
        for batch in map(part, data):
            engine.backward(loss_sum(model, batch), count(batch))
            with engine.gathered():
                norms.append(sum(p.square().sum() for p in model.parameters()).item())
            optimizer.step()
            with engine.gathered():
                norms.append(sum(p.square().sum() for p in model.parameters()).item())
        return norms

    wanted, truth = alone(program, model_for(row))
    for norms, state in on_ranks(program, model_for(row), "shard=2", row):
        assert same(state, truth, row)
        assert norms == pytest.approx(wanted, rel=0.02 if row in COPIES else 1e-11)


@pytest.mark.parametrize("row", SPLIT)
@pytest.mark.parametrize("called", ["a layer", "the model"])
def test_ranks_may_call_layers_inside_a_different_number_of_times(row: str, called: str) -> None:
    """As generations of different lengths do, between two steps."""
    data = data_for(row, batches(4))

    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        rank = engine.comm.rank if isinstance(engine, Engine) else 0
        for number, batch in enumerate(map(part, data)):
            with engine.gathered(), torch.no_grad():
                for _ in range((rank + number) % 3):
                    model(batch["x"]) if called == "the model" else model.blocks[1](torch.ones(2, 5).to(batch["x"]))
            step(model, optimizer, engine, batch)

    _, truth = alone(program, model_for(row))
    assert all(same(state, truth, row) for _, state in on_ranks(program, model_for(row), "shard=3", row))


@pytest.mark.parametrize("row", ["ddp", "zero3", "hpz"])
def test_what_gathered_refuses(row: str) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        batch = part(batches(1)[0])
        refused = partial(pytest.raises, ValueError)
        with refused(match=r"no parameter or module 'haed\.weight'; .*head\.weight"), engine.gathered("haed.weight"):
            pass
        with refused(match=r"'head\.weight' was written to.*modify=True"), engine.gathered("head"), torch.no_grad():
            model.head.weight.mul_(2)
        with refused(match=r"'head\.weight' was written to.*modify=True"), engine.gathered("head"):
            model.head.weight.data = torch.zeros(3, 5).double()
        engine.backward(loss_sum(model, batch), count(batch))
        with pytest.raises(ValueError, match="in the middle of a step"), engine.gathered(modify=True):
            pass
        with engine.gathered(), pytest.raises(ValueError, match="leave the block first"):
            optimizer.step()
        optimizer.step()

    on_ranks(program, model_for(row), "shard=2", row)


@pytest.mark.parametrize("row", WHOLE)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
def test_a_driven_model_is_not_copied(row: str, copied: Any) -> None:
    def program(model: nn.Module, optimizer: Any, engine: Any, part: Any, share: float) -> None:
        for what in (model, engine):
            with pytest.raises(ValueError, match=r"cannot be copied or pickled.*full_state_dict"):
                copied(what)

    on_ranks(program, model_for(row), "shard=2", row)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_a_pretrained_model_is_saved_whole(row: str, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    template = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))

    def body(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(template)
        engine = Engine(model, comm, strategy=row, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        state = engine.full_state_dict()
        if row == "zero3":
            with pytest.raises(ValueError, match=r"at rest.*engine\.full_state_dict"):
                model.save_pretrained(tmp_path / f"refused{comm.rank}")
        with engine.gathered():
            model.save_pretrained(tmp_path / f"gathered{comm.rank}")
        model.save_pretrained(tmp_path / f"given{comm.rank}", state_dict=dict(state))
        return state

    for rank, state in enumerate(run(Mesh(shard=2), body, deadline=20)):
        for how in ("gathered", "given"):
            saved = load_file(tmp_path / f"{how}{rank}" / "model.safetensors")
            assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)
