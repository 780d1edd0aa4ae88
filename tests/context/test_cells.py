"""A context axis trains as one process does: rows, orders, recomputed, packed, ragged, in a ring, with tensor ranks."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from context_runs import CONFIG, LENGTH, STEPS, batches, engine_of
from torch import Tensor

import plait
from plait.run.models.gpt import GPT, GPTConfig


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
