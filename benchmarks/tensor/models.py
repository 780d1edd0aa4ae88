"""The trained models: the decoder of the data-parallel benchmark, with separate projections that can be cut.

And its 16-layer MLP, in pairs of which one is cut by columns and the other by rows.

    x ── norm1 ── attention: query, key, value, out ── + ── norm2 ── mlp: up, down ── +

Attention counts its heads on the tensors that it gets, so the same code runs on all heads or on a rank's.
"""

from __future__ import annotations

import torch.nn.functional as F
from harness.models import decoder, mlp, rotate
from torch import Tensor, nn


class Attention(nn.Module):
    """Rotary causal attention over as many heads as the projections leave."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        q_BHTD, k_BHTD = self._heads(self.query(x_BTC)), self._heads(self.key(x_BTC))
        v_BHTD = self._heads(self.value(x_BTC))
        q_BHTD, k_BHTD = rotate(q_BHTD, cos_TD, sin_TD), rotate(k_BHTD, cos_TD, sin_TD)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        out: Tensor = self.out(y_BHTD.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x_BTE: Tensor) -> Tensor:
        x_BHTD: Tensor = x_BTE.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        return x_BHTD


class MLP(nn.Module):
    """down(gelu(up(x))), four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_BTC)))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = MLP(width)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC), cos_TD, sin_TD)
        hidden: Tensor = self.mlp(self.norm2(x_BTC))
        return x_BTC + hidden


class Pair(nn.Module):
    """gelu(down(gelu(up(x)))): two layers of the MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        for layer in (self.up, self.down):
            nn.init.normal_(layer.weight, std=(2.0 / width) ** 0.5)

    def forward(self, x_BC: Tensor) -> Tensor:
        return F.gelu(self.down(F.gelu(self.up(x_BC))))


WORKLOADS = {w.name: w for w in (mlp("mlp16", 8, 6, Pair), decoder(Block, 256, 2), decoder(Block, 512, 2))}
MLPS = ("mlp16",)
"""Without a vocabulary, a stream or heads: fewer plans."""
