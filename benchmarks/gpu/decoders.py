"""The decoders: their sizes, and the floating-point operations of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """A decoder of so many layers, and a step of so many samples."""

    name: str
    layers: int
    width: int
    hidden: int
    """The width of the gated MLP."""
    heads: int
    vocabulary: int
    length: int
    samples: int
    recompute: bool
    """Activations of a block are made again in the backward."""

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def parameters(self) -> int:
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width

    @property
    def flops(self) -> float:
        """A step's operations as PaLM counts them (appendix B), without recomputation and the embedding."""
        products = self.parameters - self.vocabulary * self.width
        return self.tokens * (6 * products + 12 * self.layers * self.width * self.length)


SIZES = {
    "tiny": Size("tiny", 2, 64, 128, 4, 128, 32, 4, recompute=True),
    "1b": Size("1b", 16, 2048, 5632, 16, 32000, 2048, 4, recompute=False),
    "deep": Size("deep", 48, 512, 1408, 8, 32000, 1024, 4, recompute=False),
    "7b": Size("7b", 32, 4096, 11008, 32, 32000, 2048, 2, recompute=True),
}


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm, self.mlp_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x_BTE)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTE = x_BTE + self.out(seen.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x_BTE)
        out: Tensor = x_BTE + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Decoder(nn.Module):
    """Words to the logits of the next ones."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTE = self.embed(words_BT)
        for block in self.blocks:
            x_BTE = block(x_BTE)
        out: Tensor = self.head(self.norm(x_BTE))
        return out


def batch(size: Size, device: torch.device, samples: range) -> tuple[Tensor, Tensor]:
    """Some of the same samples in every step: words and, for each, the next one."""
    words = torch.randint(size.vocabulary, (size.samples, size.length + 1), generator=torch.Generator().manual_seed(1))
    words = words[samples.start : samples.stop].to(device)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Over all words of a batch."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
