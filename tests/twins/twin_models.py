"""The small models of the twins, their batches and losses; nothing of plait but what ``adapter`` has.

    mlp      linears of odd widths in a Sequential; dropout in each block
    gpt      a decoder whose blocks stand in a list: heads, a vocabulary, perhaps one tied weight
    reader   a parent that reads its child's weight, and a module that it calls twice

Batches are ragged: 13 samples, some without a loss, so ranks and microbatches have other counts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from adapter import Chain, cross_entropy_sum, data_place
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY, LENGTH, SAMPLES, IGNORED = 24, 12, 11, 5, 13, -100
Batch = dict[str, Tensor]


class Feed(nn.Module):
    """A residual block of the mlp."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


def mlp(dropout: float = 0.0) -> nn.Module:
    blocks = [Feed(5, hidden, dropout) for hidden in (7, 11, 6, 9)]
    return nn.Sequential(nn.Linear(5, 5), *blocks, nn.Linear(5, 3))


class Attention(nn.Module):
    """Causal attention; the weights say how many heads there are."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = [f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout * self.training, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a gated mlp."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention(dropout)
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_norm, self.mlp_dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.gate, self.up = nn.Linear(WIDTH, 30, bias=False), nn.Linear(WIDTH, 30)
        self.down = nn.Linear(30, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        y = self.mlp_norm(x)
        out: Tensor = x + self.mlp_dropout(self.down(F.silu(self.gate(y)) * self.up(y)))
        return out


class GPT(Chain):
    """The decoder: embedding, blocks, norm and head."""

    def __init__(self, blocks: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def tensor_plan(self) -> dict[str, str]:
        """How a tensor axis cuts the modules."""
        columns = ("attention.query", "attention.key", "attention.value")
        stream = ("attention_norm", "attention_dropout", "mlp_norm", "mlp_dropout")
        return {
            "first": "vocabulary",
            **{f"blocks.*.{name}": "column by 2" for name in columns},
            "blocks.*.attention.out": "row by 2",
            **{f"blocks.*.{name}": "column" for name in ("gate", "up")},
            "blocks.*.down": "row",
            **{f"blocks.*.{name}": "sequence" for name in stream},
            "last": "vocabulary",
        }


def gpt(dropout: float = 0.0, tied: bool = False, blocks: int = 5) -> nn.Module:
    return GPT(blocks, dropout, tied)


class Reader(nn.Module):
    """A parent that multiplies by its child's weight, calls a module twice, and leaves another one out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.child, self.scale = nn.Linear(5, 9), nn.Parameter(torch.ones(()))
        self.twice, self.unused = Feed(9, 4, dropout), nn.Linear(3, 3)
        self.head = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(self.twice(self.child(x))) * self.scale
        out: Tensor = self.head(F.linear(y, self.child.weight.t()))
        return out


def reader(dropout: float = 0.0) -> nn.Module:
    return Reader(dropout)


MODELS = {"mlp": mlp, "gpt": gpt, "reader": reader}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def narrow(dtype: str) -> torch.dtype:
    """The dtype of a computation."""
    return DTYPES[dtype.removesuffix("-mixed")]


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Gives every weight a number of its own, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.3 + ("norm" in name and parameter.dim() == 1))
    return model


def build(cell: dict[str, Any]) -> nn.Module:
    """The model of a cell."""
    kind = cell.get("model", "mlp")
    tied = {"tied": cell.get("tied", False)} if kind == "gpt" else {}
    model = MODELS[kind](dropout=cell.get("dropout", 0.0), **tied)
    model = filled(model.double() if cell.get("dtype") == "fp64" else model, cell.get("weights", 0))
    if cell.get("frozen"):
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 4 != 1)
    return model


def batches(cell: dict[str, Any], steps: int) -> list[Batch]:
    """Global batches, a step each."""
    generator = torch.Generator().manual_seed(7)
    samples, made = cell.get("samples", SAMPLES), []
    for _ in range(steps):
        mask = torch.rand(samples, generator=generator) < 0.7
        mask[0] = True
        if cell.get("model") == "gpt":
            tokens = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=generator)
            targets = torch.where(torch.rand(samples, LENGTH, generator=generator) < 0.8, tokens[:, 1:], IGNORED)
            targets[0, 0] = 1
            made.append({"x": tokens[:, :-1].contiguous(), "y": targets})
        else:
            x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
            y = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
            made.append({"x": x.to(narrow(cell.get("dtype", "fp32"))), "y": y, "mask": mask})
    return made


def deal(batch: Batch, comm: Any, num_microbatches: int) -> list[Batch]:
    """A rank's microbatches: contiguous samples, uneven where they must be."""
    place, ranks = data_place(comm)
    pieces = {name: tensor.tensor_split(ranks * num_microbatches) for name, tensor in batch.items()}
    numbers = range(place * num_microbatches, (place + 1) * num_microbatches)
    return [{name: piece[number] for name, piece in pieces.items()} for number in numbers]


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of a batch's losses."""
    out = model(batch["x"])
    if "mask" not in batch:
        return cross_entropy_sum(out, batch["y"], IGNORED)
    wide = out if out.dtype == torch.float64 else out.float()
    error = wide - batch["y"].to(wide.dtype)
    return (error.square().sum(1) * batch["mask"]).sum()


def count(batch: Batch) -> int:
    """How many terms the sum has."""
    return int(batch["mask"].sum()) if "mask" in batch else int((batch["y"] != IGNORED).sum())


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """A stock optimizer; ``groups`` has two groups."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if name == "groups":
        matrices, others = ([p for p in parameters if (p.dim() > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-4)
