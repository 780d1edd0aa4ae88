"""After the first steps of a run under a context axis: evaluation, an average, a resume elsewhere, text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from context_runs import CONFIG, batches, engine_of
from torch import Tensor

import plait
from plait.anymodel.context import use_context_axis
from plait.run.models.gpt import GPT, loss_sum
from plait.run.models.hf import BUILDING
from plait.tensor.time_axis import whole_time


def train(
    comm: plait.Comm, steps: range, microbatches: int, *, read: Path | None = None, write: Path | None = None
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses of steps and of evaluations of the average; the weights and the average."""
    with plait.empty_parameters():
        model = GPT(CONFIG).double()
    engine = engine_of(comm, model, optimizer=partial(torch.optim.AdamW, lr=1e-2), seed=3)
    ema, axis, found = plait.EMA(engine, 0.5), engine.placed.time_axis, []
    if read is not None:
        plait.load(read, engine, ema=ema)
    for step in steps:
        if comm.mesh.pipe == 1:  # a forward of the program's own, whose tensors no backward may keep
            (batch, *_) = batches(step, comm.data_rank, comm.mesh.data_size, microbatches, packed=False)
            model.eval()
            with torch.inference_mode():
                loss_sum(model, batch if axis is None else axis.cut_batch(batch))
            model.train()
        part = (comm.data_rank, comm.mesh.data_size, microbatches)
        found.append(engine.step(batches(step, *part, packed=step == 1)).loss)
        ema.update()
        with ema.swapped():
            found.append(engine.evaluate(batches(9, *part, packed=False)).loss)
    if write is not None:
        plait.save(write, engine, ema=ema)
    return found, [engine.full_state_dict(), ema.full_state_dict()]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of one process; a folder with half of it by two context ranks, and their losses."""
    folder = tmp_path_factory.mktemp("run") / "saved"
    right, state = plait.run_threads("shard=1", lambda c: train(c, range(4), 4))[0]
    first, _ = plait.run_threads("shard=2 context=2", lambda c: train(c, range(2), 4, write=folder))[0]
    return right, state, folder, first


@pytest.mark.parametrize("mesh", ["pipe=2 shard=3 context=3", "shard=4", "shard=4 context=4"])
def test_a_run_of_two_context_ranks_goes_on_under_another_mesh(mesh: str, begun: Any) -> None:
    (right, state, folder, first), parts = begun, plait.Mesh.parse(mesh).data_size
    for losses, mine in plait.run_threads(mesh, lambda c: train(c, range(2, 4), 4 // parts, read=folder)):
        assert first + losses == pytest.approx(right, rel=1e-12)
        for found, due in zip(mine, state, strict=True):
            assert all(torch.allclose(found[name], value, rtol=1e-9, atol=1e-12) for name, value in due.items())


def test_a_trained_model_writes_text_where_each_rank_has_whole_samples() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def body(comm: plait.Comm) -> list[list[int]]:
        config = LlamaConfig(
            vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6
        )
        with BUILDING, plait.empty_parameters():
            model: Any = LlamaForCausalLM(config).double()
        use_context_axis(model)
        engine = engine_of(comm, model, loss_fn=lambda m, b: m(b).logits.square().sum(), count_fn=torch.numel)
        batch = torch.arange(16).view(1, 16)
        engine.step([batch])
        if comm.mesh.context > 1:
            with engine.gathered(), pytest.raises(ValueError, match=r"to generate, use whole_time\(model\)"):
                model.generate(batch, max_new_tokens=3, do_sample=False)
        with engine.gathered(), whole_time(model):
            text: list[list[int]] = model.generate(batch, max_new_tokens=3, do_sample=False).tolist()
        engine.step([batch])
        return text

    (alone,) = plait.run_threads("shard=1", body, sanitize=False)
    assert plait.run_threads("shard=2 context=2", body, sanitize=False) == [alone, alone]
