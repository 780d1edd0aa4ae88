"""The trained models: the same weights and the same batches for every contestant.

A ``Workload`` is a recipe, not an object: each contestant builds its own copy, and because every build
starts from the same seed all copies start from the same bits. A batch is a pair (inputs, targets) and a
pure function of the step number; each rank slices its own samples out of the *global* batch, so the work
is fixed and two ranks do half of it each.

The loss has two forms of the same number: torch's engines take a *mean* over the local
samples (they average gradients over ranks), plait takes a *sum* and a *count* (it divides once).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
BlockBuild = Callable[[int, int], nn.Module]
"""(width, number of heads) -> a decoder block."""


@dataclass(frozen=True)
class Workload:
    """One line of the benchmark: a model, its data, its loss, and how many steps make a round."""

    name: str
    model: Callable[[], nn.Module]
    global_batch: Callable[[torch.Generator], Batch]
    pair_loss_sum: Callable[[Tensor, Tensor], Tensor]
    steps_per_round: int
    learning_rate: float

    def build(self) -> nn.Module:
        """A fresh copy; the same bits on every rank and for every contestant."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model()

    def batch(self, step: int, rank: int, ranks: int) -> Batch:
        """This rank's contiguous samples of the global batch of ``step``."""
        inputs, targets = self.global_batch(torch.Generator().manual_seed(1000 + step))
        if len(inputs) % ranks:
            raise ValueError(f"{ranks} ranks do not divide the global batch of {len(inputs)}: choose another --ranks")
        mine = len(inputs) // ranks
        rows = slice(rank * mine, (rank + 1) * mine)
        return inputs[rows].clone(), targets[rows].clone()

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """plait's face: a sum."""
        return self.pair_loss_sum(model(batch[0]), batch[1])

    def count(self, batch: Batch) -> int:
        """plait's divisor: elements of the target."""
        return batch[1].numel()

    def loss_mean(self, model: nn.Module, batch: Batch) -> Tensor:
        """torch's face: the mean over this rank's samples."""
        return self.loss_sum(model, batch) / self.count(batch)


class Layer(nn.Module):
    """gelu(x @ W): one matrix and nothing else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.linear.weight, std=(2.0 / width) ** 0.5)

    def forward(self, x_BC: Tensor) -> Tensor:
        return F.gelu(self.linear(x_BC))


class Chain(nn.Module):
    """Blocks in turn; every weight is used once for a sample, so bytes per flop are as high as they get."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = block(x_BC)
        return x_BC


def square_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def mlp(
    name: str, num_blocks: int, steps_per_round: int, block: Callable[[int], nn.Module] = Layer, width: int = 1024
) -> Workload:
    """A chain of blocks on 128 random samples, square loss: nearly all communication."""

    def global_batch(generator: torch.Generator) -> Batch:
        pair = torch.randn(2, 128, width, generator=generator)
        return pair[0], pair[1]

    def build() -> nn.Module:
        return Chain(block(width) for _ in range(num_blocks))

    return Workload(name, build, global_batch, square_sum, steps_per_round, 1e-4)


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary position embedding on halves."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat([first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD], dim=-1)


def attention(qkv_BTE: Tensor, num_heads: int, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary causal attention of fused queries, keys and values [B, T, 3 width] -> [B, T, width]."""
    batch, length, width = qkv_BTE.shape
    qkv = qkv_BTE.view(batch, length, 3, num_heads, -1)
    q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4)
    q_BHTD, k_BHTD = rotate(q_BHTD, cos_TD, sin_TD), rotate(k_BHTD, cos_TD, sin_TD)
    y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
    return y_BHTD.transpose(1, 2).reshape(batch, length, width // 3)


class Block(nn.Module):
    """A decoder block: RMSNorm, rotary causal attention, RMSNorm, GELU MLP four times as wide."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.out(attention(self.qkv(self.norm1(x_BTC)), self.num_heads, cos_TD, sin_TD))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x_BTC))))
        return x_BTC + hidden


class GPT(nn.Module):
    """Embedding, blocks, norm, untied head; no dropout, so that all engines compute one number.

    A benchmark may bring its own block, ``block(width, num_heads)``, called with (x_BTC, cos_TD, sin_TD).
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, block: BlockBuild, num_layers: int, width: int, length: int, vocabulary: int, head_width: int = 64
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block(width, width // head_width) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        frequency = 10000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angle = torch.outer(torch.arange(length), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


def cross_entropy_sum(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), reduction="sum")


def decoder(
    block: BlockBuild,
    width: int,
    steps_per_round: int,
    num_layers: int = 8,
    length: int = 256,
    vocabulary: int = 4096,
    samples: int = 8,
    model: type[GPT] = GPT,
) -> Workload:
    """The decoder of a benchmark's blocks, on random tokens; ``model`` may chain them in its own way."""

    def global_batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocabulary, (samples, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(
        f"gpt{width}",
        lambda: model(block, num_layers, width, length, vocabulary),
        global_batch,
        cross_entropy_sum,
        steps_per_round,
        1e-3,
    )
