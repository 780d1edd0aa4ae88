"""The model and the batches of the context axis's tests."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.run.models.gpt import GPTConfig

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
