"""A model with every style in it, for the tests of tensor parallelism: odd sizes, fused heads, dropout at every site.

embed ─► dropout ─► [ norm ─► attention ─► dropout ─► + ─► norm ─► mlp ─► + ] x 2 ─► norm ─► out (gathered)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from engine_cases import Batch, Run, agree, distinct, sgd, train
from torch import Tensor, nn

TOKENS = 11
WIDTH = 5


class Attention(nn.Module):
    """Query, key and value fused in one product: 12, 6 and 6 heads of 2, as many on a rank as its rows say."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)
        self.mixed_dropout = nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads_BTHK = self.qkv(x_BTD).unflatten(-1, (-1, 2))
        groups = heads_BTHK.size(2) // 4
        query, key, value = heads_BTHK.transpose(1, 2).split((2 * groups, groups, groups), 1)
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True, enable_gqa=True)
        return self.out(self.mixed_dropout(mixed).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """7 features; dropout as a module and as a function, and as a function on the stream again."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 7, bias=False), nn.Linear(7, WIDTH)
        self.inner = nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTE = F.dropout(self.inner(self.gate(x_BTD).tanh()) * self.up(x_BTD), self.dropout, self.training)
        return self.down(hidden_BTE)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(WIDTH), Attention(dropout), nn.Dropout(dropout)
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.norm(x_BTD)))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, padding_idx=3)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.dropout(self.embed(tokens_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.out_dropout(self.out(self.norm(x_BTD)))

    def tensor_plan(self) -> dict[str, str]:
        return {
            "embed": "vocabulary",
            "dropout": "sequence",
            "blocks.*.norm": "sequence",
            "blocks.*.attention.qkv": "column 12|6|6 by 2",
            "blocks.*.attention.mixed_dropout": "heads",
            "blocks.*.attention.out": "row by 2",
            "blocks.*.dropout": "sequence",
            "blocks.*.mlp_norm": "sequence",
            "blocks.*.mlp.gate": "column",
            "blocks.*.mlp.up": "column",
            "blocks.*.mlp.inner": "hidden",
            "blocks.*.mlp.down": "row",
            "norm": "sequence",
            "out": "gathered",
            "out_dropout": "whole",
        }


def model(dropout: float = 0.3) -> nn.Module:
    return distinct(Model(dropout))


def token_batches(steps: int = 2, samples: int = 13, length: int = 7) -> list[Batch]:
    """Tokens [samples, length], the padding among them, and a mask that drops samples."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(steps):
        tokens = torch.randint(0, TOKENS, (samples, length), generator=generator)
        mask = (torch.rand(samples, generator=generator) < 0.7).double()
        mask[0] = 1
        made.append({"x": tokens, "mask": mask})
    return made


def alone(template: nn.Module, data: Sequence[Batch], **settings: Any) -> Run:
    """The run of one rank, whose dropout is that of the samples."""
    return train(template, "shard=1", "ddp", list(data), **{"optimizer": sgd, **settings})[0]


def same_run(ranks: list[Run], single: Run, tolerance: float = 1e-12) -> None:
    """Losses, norms and whole final parameters of every rank are the single run's."""
    assert all([norm is None for norm in run.norms] == [norm is None for norm in single.norms] for run in ranks)
    agree(ranks, replace(single, norms=[] if None in single.norms else single.norms, gradients=[]), tolerance)
