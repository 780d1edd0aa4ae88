"""The model and the batches of the context axis's tests."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import plait
from plait.run.models.gpt import GPT, GPTConfig, loss_sum, token_count

CONFIG = GPTConfig(
    vocabulary=37, num_layers=3, width=24, num_heads=6, num_kv_heads=2, hidden=20, max_length=24, dropout=0.2
)
STEPS, SAMPLES, LENGTH = 3, 12, 24


def engine_of(comm: plait.Comm, model: Any = None, **settings: Any) -> plait.Engine:
    """An engine on a model, or on a GPT of fp32; without momentum, if nothing else is said."""
    if model is None:
        with plait.empty_parameters():
            model = GPT(CONFIG)
    optimizer = settings.pop("optimizer", partial(torch.optim.SGD, lr=0.1))(model.parameters())
    usual = {"loss_fn": loss_sum, "count_fn": token_count}
    return plait.Engine(model, comm, optimizer=optimizer, **(usual | settings))


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
