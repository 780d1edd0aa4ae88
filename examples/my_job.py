"""A job of your own, for ``plait verify --job examples/my_job.py:job`` and ``plait train --job ...``."""

import torch
from torch import nn

import plait


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 8, generator=generator)
    return x, x.sin()


def loss_sum(model, batch):
    x, y = batch
    return (model(x) - y).square().sum()


job = plait.UserJob(
    build=lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)),
    loss_fn=loss_sum,
    count_fn=lambda batch: batch[1].numel(),
    batches=batch,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
)
