"""Torch's own modules in small nets, for the tests of stock models.

``NETS`` has for each name the function that builds the net, and its batches' number of time steps (None: none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from stock_cases import Batch, classified
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 6


def vectors(time: int | None = None) -> list[Batch]:
    """fp32 [13, WIDTH] or [13, time, WIDTH], and classes."""
    return classified(13, *([] if time is None else [time]), WIDTH, seed=9)


class Headed(nn.Module):
    """Something over time, its mean, and a linear head."""

    def __init__(self, body: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)

    def features(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.body(x_BTC)
        return out

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x_BTC).mean(1))
        return out


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Masked(Headed):
    """A causal mask and padding."""

    def features(self, x_BTC: Tensor) -> Tensor:
        length = x_BTC.shape[1]
        padding_BT = torch.zeros(x_BTC.shape[:2])
        padding_BT[:, -1] = float("-inf")
        causal_TT = nn.Transformer.generate_square_subsequent_mask(length)
        out: Tensor = self.body(x_BTC, mask=causal_TT, src_key_padding_mask=padding_BT, is_causal=True)
        return out


class BothEnds(Headed):
    def features(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.body(x_BTC, x_BTC.flip(1))
        return out


class Attending(Headed):
    """Adds biases to keys and values, and returns its weights."""

    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True, add_bias_kv=True, add_zero_attn=True))

    def features(self, x_BTC: Tensor) -> Tensor:
        out_BTC, weights_BTT = self.body(x_BTC, x_BTC, x_BTC, need_weights=True)
        return out_BTC * weights_BTT.square().sum(-1, keepdim=True)


class Recurrent(Headed):
    def features(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.body(x_BTC)[0]
        return out


class Stepping(Headed):
    """A cell that is called once per step of time."""

    def features(self, x_BTC: Tensor) -> Tensor:
        h_BC = x_BTC.new_zeros(len(x_BTC), 5)
        for t in range(x_BTC.shape[1]):
            h_BC = self.body(x_BTC[:, t], h_BC)
        return h_BC[:, None]


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    """A perceptron whose middle weight is computed from others."""

    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
        change(net[2])
        return net

    return build


class Twice(nn.Module):
    """Modules used several times, one of them under three names; one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 3)
        self.drop = nn.Dropout(0.2)
        self.head, self.unused = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.ends(x)))
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x)))
        out: Tensor = self.head(torch.tanh(self.ends(x)))
        return out


class Odd(nn.Module):
    """A scalar, an empty parameter, a product of three dims, an embedding and a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.pair = nn.Bilinear(WIDTH, WIDTH, 3)
        self.bag, self.table = nn.EmbeddingBag(11, 3), nn.Embedding(11, 3, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 3).long().clamp(max=10)
        out: Tensor = self.pair(x, x) * self.scale + self.bag(words) + self.table(words).sum(1)
        return out


class Convolved(Headed):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Conv1d(WIDTH, 6, 3, padding=1, groups=2),
                nn.GroupNorm(2, 6),
                nn.PReLU(6),
                nn.ConvTranspose1d(6, 5, 3),
                nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
                nn.Dropout1d(0.1),
                nn.Conv1d(5, 5, 2, padding_mode="circular", padding=1),
            ),
            5,
        )

    def features(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.body(x_BTC.transpose(1, 2)).transpose(1, 2)
        return out


class Adapted(nn.Module):
    """LoRA by hand: a frozen linear and a trained product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(self.drop(x)))
        return out


class Lent(nn.Module):
    """A part that reads a table of another part, and has units of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH)
        self.inner = Borrowing(self.table)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(torch.tanh(self.table(x))))
        return out


class Borrowing(nn.Module):
    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.weight = table.weight
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.linear(x, self.weight)


NETS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "encoder": (lambda: Headed(encoder()), 4),
    "encoder, masks": (lambda: Masked(encoder()), 4),
    "transformer": (lambda: BothEnds(nn.Transformer(WIDTH, 2, 1, 2, 8, 0.1, batch_first=True)), 4),
    "attention": (Attending, 4),
    "lstm": (lambda: Recurrent(nn.LSTM(WIDTH, 5, 2, batch_first=True, bidirectional=True), 10), 4),
    "cell": (lambda: Stepping(nn.GRUCell(WIDTH, 5), 5), 4),
    "spectral norm": (changed(parametrizations.spectral_norm), None),
    "symmetric": (changed(lambda module: parametrize.register_parametrization(module, "weight", Symmetric())), None),
    "twice": (Twice, None),
    "odd": (Odd, None),
    "convolutions": (Convolved, 5),
    "adapters": (lambda: nn.Sequential(Adapted(nn.Linear(WIDTH, 7)), nn.Tanh(), Adapted(nn.Linear(7, 3))), None),
}
