"""torch's own context manager moves what autograd keeps to the CPU, around ``engine.step``, and changes no bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import plait
from plait.run.models.gpt import GPT, GPTConfig, loss_sum, token_count


def train(comm: plait.Comm, settings: dict[str, Any], *, moves: bool) -> tuple[list[float], dict[str, Tensor]]:
    with plait.empty_parameters():
        model = GPT(
            GPTConfig(vocabulary=11, num_layers=3, width=8, num_heads=2, num_kv_heads=2, max_length=8, dropout=0.1)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = plait.Engine(
        model, comm, optimizer=optimizer, loss_fn=loss_sum, count_fn=token_count, clip=0.5, **settings
    )
    draw = torch.Generator().manual_seed(comm.data_rank)
    losses = []
    for _ in range(3):
        parts = [torch.randint(11, (2, 2, 8), generator=draw) for _ in range(2)]
        with save_on_cpu() if moves else nullcontext():
            losses.append(engine.step([{"tokens": tokens, "targets": targets} for tokens, targets in parts]).loss)
    return losses, engine.full_state_dict()


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("shard=2", {"strategy": "ddp"}),
        ("shard=2", {"strategy": "zero3", "recompute": "full"}),
        ("pipe=2 shard=2", {"strategy": "zero3", "schedule": "1f1b"}),
    ],
)
def test_saving_on_the_cpu_changes_no_bit(mesh: str, settings: dict[str, Any]) -> None:
    right, moved = (plait.run_threads(mesh, lambda c, m=m: train(c, settings, moves=m)) for m in (False, True))
    for (losses, state), (due, values) in zip(moved, right, strict=True):
        assert losses == due and all(torch.equal(state[name], value) for name, value in values.items())
