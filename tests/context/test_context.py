"""A context axis trains as one process does: rows, pipelines, packed documents, dropout, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from plait.anymodel.context import use_context_axis
from plait.run.models.gpt import GPT, GPTConfig, loss_sum, token_count
from plait.tensor.time_axis import TimeAxis

CONFIG = GPTConfig(
    vocabulary=37, num_layers=3, width=24, num_heads=6, num_kv_heads=2, hidden=20, max_length=24, dropout=0.2
)
STEPS, SAMPLES, LENGTH = 3, 12, 24


def batches(step: int, part: int, parts: int, microbatches: int, *, packed: bool) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(CONFIG.vocabulary, (SAMPLES, LENGTH + 1), generator=numbers)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=numbers) < 0.3] = -100
    whole = {"tokens": tokens[:, :-1].clone(), "targets": targets}
    if packed:
        whole["documents"] = torch.randint(2, (SAMPLES, LENGTH), generator=numbers).cumsum(1)
    each = SAMPLES // (parts * microbatches)
    first = part * microbatches
    return [{k: v[(first + m) * each :][:each] for k, v in whole.items()} for m in range(microbatches)]


def train(comm: plait.Comm, microbatches: int = 2, packed: bool = False, dropout: float = 0.2, **settings: Any) -> Any:
    torch.manual_seed(0)
    with plait.empty_parameters():
        model = GPT(GPTConfig(**{**vars(CONFIG), "dropout": dropout})).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = plait.Engine(
        model, comm, optimizer=optimizer, loss_fn=loss_sum, count_fn=token_count, clip=0.5, seed=3, **settings
    )
    mesh = comm.mesh
    losses = []
    for step in range(STEPS):
        mine = batches(step, mesh.data_rank(comm.rank), mesh.data_size, microbatches, packed=packed)
        losses.append(engine.step(mine).loss)
    losses.append(engine.evaluate(mine).loss)
    return losses, engine.full_state_dict()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("shard=2 context=2", {"strategy": "ddp"}),
    "zero1": ("shard=3 context=3", {"strategy": "zero1"}),
    "zero2": ("shard=4 context=4", {"strategy": "zero2"}),
    "zero3": ("shard=4 context=2", {"strategy": "zero3"}),
    "hsdp": ("replica=2 shard=2 context=2", {"strategy": "hsdp"}),
    "packed": ("shard=2 context=2", {"strategy": "zero3", "packed": True}),
    "packed over 3": ("shard=3 context=3", {"strategy": "zero3", "packed": True}),
    "recomputed": ("shard=2 context=2", {"strategy": "zero3", "recompute": "full"}),
    "attention recomputed": ("shard=2 context=2", {"strategy": "zero3", "recompute": "selective"}),
    "1f1b": ("pipe=2 shard=2 context=2", {"strategy": "zero3", "schedule": "1f1b"}),
    "ring": ("shard=2 context=2", {"strategy": "zero3", "dropout": 0.0, "ring_attention": True}),
    "ring of 4, recomputed": (
        "shard=4 context=4",
        {"strategy": "zero3", "dropout": 0.0, "ring_attention": True, "recompute": "full"},
    ),
    "ring, 1f1b": ("pipe=2 shard=3 context=3", {"schedule": "1f1b", "dropout": 0.0, "ring_attention": True}),
    "tensor": ("shard=2 tensor=2 context=2", {"strategy": "zero3", "dropout": 0.0}),
    "sequence": ("shard=2 tensor=2 context=2", {"strategy": "zero1", "dropout": 0.0, "sequence_parallel": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_run_of_one_process(case: str) -> None:
    mesh, settings = CASES[case]
    data = plait.Mesh.parse(mesh)
    alone = {k: v for k, v in settings.items() if k in ("packed", "dropout")}
    right, state = plait.run_threads("shard=1", lambda c: train(c, 2 * data.data_size, **alone), sanitize=False)[0]
    for losses, mine in plait.run_threads(mesh, lambda c: train(c, **settings), sanitize=False):
        assert losses == pytest.approx(right, rel=1e-12)
        assert all(torch.allclose(mine[name], value, rtol=1e-9, atol=1e-11) for name, value in state.items())


def hf_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["tokens"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum", ignore_index=-100)


def train_hf(comm: plait.Comm, microbatches: int, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=CONFIG.vocabulary, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=LENGTH, attention_dropout=0.1,
    )  # fmt: skip
    with plait.empty_parameters():
        model: Any = LlamaForCausalLM(config).double()
    use_context_axis(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = plait.Engine(model, comm, optimizer=optimizer, loss_fn=hf_loss, count_fn=token_count, clip=0.5, **settings)
    mesh = comm.mesh
    for step in range(STEPS):
        engine.step(batches(step, mesh.data_rank(comm.rank), mesh.data_size, microbatches, packed=False))
    return engine.full_state_dict()


@pytest.mark.parametrize("mesh", ["shard=2 context=2", "shard=6 context=3"])
def test_a_hugging_face_decoder_is_the_run_of_one_process(mesh: str) -> None:
    parts = plait.Mesh.parse(mesh).data_size
    right = plait.run_threads("shard=1", lambda c: train_hf(c, 2 * parts), sanitize=False)[0]
    for mine in plait.run_threads(mesh, lambda c: train_hf(c, 2, strategy="zero3"), sanitize=False):
        assert all(torch.allclose(mine[name], value, rtol=1e-9, atol=1e-11) for name, value in right.items())


def test_what_cannot_be_cut_in_time_is_refused() -> None:
    def body(comm: plait.Comm) -> None:
        axis = TimeAxis(comm)
        with plait.empty_parameters():
            one = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="must be a multiple of 4"):
            axis.cut_batch({"tokens": torch.zeros(2, 6)})
        with pytest.raises(ValueError, match=r"give \[..., 4, 8\]"):
            axis.attention(*(torch.zeros(1, 1, 4, 2) for _ in range(3)), mask=torch.zeros(4, 4))
        with pytest.raises(ValueError, match="no module of Linear has a 'time_axis'"):
            plait.Engine(one, comm)

    plait.run_threads("shard=2 context=2", body)
    with pytest.raises(ValueError, match="context=2 borrows neighbours of shard=3"):
        plait.Mesh.parse("shard=3 context=2")


def test_ranks_that_bring_different_samples_are_refused() -> None:
    def body(comm: plait.Comm) -> None:
        with plait.empty_parameters():
            model = GPT(CONFIG)
        engine = plait.Engine(
            model, comm, optimizer=torch.optim.SGD(model.parameters()), loss_fn=loss_sum, count_fn=token_count
        )
        with pytest.raises(ValueError, match="the ranks of a context group bring different batches"):
            engine.step(batches(comm.rank, 0, 1, 1, packed=False))

    plait.run_threads("shard=2 context=2", body)


def own_loop(comm: plait.Comm) -> Any:
    with plait.empty_parameters():
        model = GPT(CONFIG).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer, clip=0.5)
    for step in range(STEPS):
        (batch,) = batches(step, comm.mesh.data_rank(comm.rank), comm.mesh.data_size, 1, packed=True)
        if engine.placed.time_axis is not None:
            batch = engine.placed.time_axis.cut_batch(batch)
        engine.backward(loss_sum(model, batch), token_count(batch), "sum")
        optimizer.step()
    return engine.full_state_dict()


def test_a_programs_own_loop_cuts_its_batch() -> None:
    right = plait.run_threads("shard=1", own_loop)[0]
    for mine in plait.run_threads("shard=4 context=2", own_loop):
        assert all(torch.allclose(mine[name], value, rtol=1e-9, atol=1e-11) for name, value in right.items())
