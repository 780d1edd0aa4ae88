"""A context axis trains as one process does: rows, pipelines, packed documents, dropout, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.run.models.gpt import GPT, GPTConfig, loss_sum, token_count

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
