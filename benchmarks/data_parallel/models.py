"""What is trained: three plain PyTorch models whose layers are called ``blocks``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness.models import Batch, Block, Workload, decoder
from torch import Tensor, nn


class Layer(nn.Module):
    """gelu(x @ W): one matrix, nothing to hide behind."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.linear.weight, std=(2.0 / width) ** 0.5)

    def forward(self, x_BC: Tensor) -> Tensor:
        return F.gelu(self.linear(x_BC))


class MLP(nn.Module):
    """``num_layers`` layers; every weight is used once, so bytes per flop are as high as they get."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(num_layers))

    def forward(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = block(x_BC)
        return x_BC


def square_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def _mlp(num_layers: int, steps_per_round: int, width: int = 1024, samples: int = 128) -> Workload:
    def global_batch(generator: torch.Generator) -> Batch:
        pair = torch.randn(2, samples, width, generator=generator)
        return pair[0], pair[1]

    return Workload(f"mlp{num_layers}", lambda: MLP(num_layers, width), global_batch, square_sum, steps_per_round, 1e-4)


WORKLOADS = {w.name: w for w in (_mlp(4, 20), _mlp(16, 6), decoder(Block, 256, 2))}
TINY = decoder(Block, 64, 1, num_layers=1, length=8, vocabulary=16)
"""Trained once before memory is measured: what an engine imports lazily is not counted as its memory."""
