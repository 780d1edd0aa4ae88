"""A context axis trains as one process does in every layout; evaluation, an average, a resume and text go on, too."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from context_runs import CONFIG, LENGTH, STEPS, batches, engine_of
from torch import Tensor

import plait
from plait.anymodel.context import use_context_axis
from plait.run.models.gpt import GPT, GPTConfig, loss_sum
from plait.run.models.hf import BUILDING
from plait.tensor.time_axis import whole_time


def train(
    comm: plait.Comm, microbatches: int = 2, packed: bool = False, ragged: bool = False, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norms and parameters of three steps; ``settings`` are of the model or of the engine."""
    model_settings = {key: settings.pop(key) for key in ("dropout", "num_kv_heads", "num_heads") if key in settings}
    torch.manual_seed(0)
    with plait.empty_parameters():
        model = GPT(GPTConfig(**{**vars(CONFIG), **model_settings})).double()
    engine = engine_of(comm, model, optimizer=SGD, clip=0.5, seed=3, **settings)
    mesh, found = comm.mesh, []
    for step in range(STEPS):
        mine = batches(step, mesh.data_rank(comm.rank), mesh.data_size, microbatches, packed=packed)
        if ragged:  # each microbatch is shorter than the one before it
            first = mesh.data_rank(comm.rank) * microbatches
            mine = [{k: v[:, : LENGTH - (first + m) * 4] for k, v in one.items()} for m, one in enumerate(mine)]
        result = engine.step(mine)
        found += [result.loss, result.grad_norm]
    found.append(engine.evaluate(mine).loss)
    return found, engine.full_state_dict()


SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
DRY = {"dropout": 0.0}
RING = {"dropout": 0.0, "ring_attention": True}
CELLS: list[tuple[str, dict[str, Any]]] = [
    *(("shard=2 context=2", {"strategy": row}) for row in ("ddp", "zero3_keep")),
    ("shard=3 context=3", {"strategy": "zero1", "microbatches": 1}),
    ("shard=4 context=4", {"strategy": "zero2"}),
    ("shard=4 context=2", {"strategy": "zero3"}),
    ("shard=4 context=2", {"strategy": "zero3", "microbatches": 1, "cut": "tensor"}),
    *(("replica=2 shard=2 context=2", {"strategy": row}) for row in ("hsdp", "psdp", "hpz")),
    ("shard=2 context=2", {"packed": True}),
    ("shard=3 context=3", {"packed": True, "strategy": "ddp"}),
    ("shard=4 context=2", {"packed": True, "strategy": "zero1", "microbatches": 3}),
    ("shard=2 context=2", {"recompute": "full"}),
    ("shard=2 context=2", {"recompute": "selective", **DRY}),
    ("shard=2 context=2", {"ragged": True, "microbatches": 3}),
    ("shard=2 context=2", {"ragged": True, "strategy": "zero1", **DRY}),
    ("shard=2 context=2", {"ragged": True, "strategy": "zero2", "recompute": "full", **RING}),
    ("shard=2 context=2", {"num_kv_heads": 6, **DRY}),
    ("shard=2 context=2", {"num_kv_heads": 1}),
    ("shard=3 context=3", {"num_kv_heads": 1, **RING}),
    *(("pipe=2 shard=2 context=2", {"schedule": one}) for one in ("1f1b", "zb_h1", "dualpipe_v")),
    ("pipe=2 shard=2 context=2", {"schedule": "interleaved", "chunks": 2, "strategy": "zero1"}),
    ("pipe=2 shard=2 context=2", {"schedule": "1f1b", "recompute": "full", "microbatches": 3, **DRY}),
    ("pipe=2 shard=3 context=3", {"schedule": "zbv"}),
    ("shard=2 context=2", {"microbatches": 1, **RING}),
    ("shard=4 context=4", {"recompute": "full", **RING}),
    ("pipe=2 shard=3 context=3", {"schedule": "1f1b", **RING}),
    ("replica=2 shard=2 context=2", {"strategy": "hsdp", **RING}),
    ("shard=2 tensor=2 context=2", {"strategy": "zero3", **DRY}),
    ("shard=2 tensor=2 context=2", {"strategy": "zero2", "recompute": "full", **RING}),
    ("shard=2 tensor=2 context=2", {"strategy": "zero1", "sequence_parallel": True, **DRY}),
    ("shard=2 tensor=2 context=2", {"sequence_parallel": True, "recompute": "selective", **DRY}),
    ("pipe=2 shard=2 tensor=2 context=2", {"schedule": "1f1b", "sequence_parallel": True, **DRY}),
]
OF_THE_MODEL = ("packed", "ragged", "dropout", "num_kv_heads")


def cell_id(part: Any) -> str:
    return part if isinstance(part, str) else " ".join(f"{key}={value}" for key, value in part.items())


@cache
def right(microbatches: int, settings: tuple[tuple[str, Any], ...]) -> tuple[list[float], dict[str, Tensor]]:
    return plait.run_threads("shard=1", lambda c: train(c, microbatches, **dict(settings)), sanitize=False)[0]


@pytest.mark.parametrize(("mesh", "settings"), CELLS, ids=cell_id)
def test_it_is_the_run_of_one_process(mesh: str, settings: dict[str, Any]) -> None:
    alone = tuple((key, settings[key]) for key in OF_THE_MODEL if key in settings)
    found, state = right(settings.get("microbatches", 2) * plait.Mesh.parse(mesh).data_size, alone)
    for numbers, mine in plait.run_threads(mesh, lambda c: train(c, **settings), sanitize=False):
        assert numbers == pytest.approx(found, rel=1e-12)
        assert all(torch.allclose(mine[name], value, rtol=1e-12, atol=1e-12) for name, value in state.items())


def train_on(
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
    right, state = plait.run_threads("shard=1", lambda c: train_on(c, range(4), 4))[0]
    first, _ = plait.run_threads("shard=2 context=2", lambda c: train_on(c, range(2), 4, write=folder))[0]
    return right, state, folder, first


@pytest.mark.parametrize("mesh", ["pipe=2 shard=3 context=3", "shard=4", "shard=4 context=4"])
def test_a_run_of_two_context_ranks_goes_on_under_another_mesh(mesh: str, begun: Any) -> None:
    (right, state, folder, first), parts = begun, plait.Mesh.parse(mesh).data_size
    for losses, mine in plait.run_threads(mesh, lambda c: train_on(c, range(2, 4), 4 // parts, read=folder)):
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
