"""A small modern decoder, written so that any engine can take it apart.

    tokens_BT -> embed -> block 0 -> ... -> block L-1 -> norm -> head -> logits_BTV
                   |                                              |
                   +--------------- one Parameter ----------------+

``forward`` is a plain chain: each link takes an activation and returns the next, so a pipeline may cut between any two.
A block is pre-norm (RMSNorm), rotary attention with grouped key/value heads, then SwiGLU; it takes its number of heads
from the tensors, so projections cut by heads need no change here.

A module that owns parameters initialises only them, at their full shapes, in its ``reset_parameters``.  The head owns
none: its weight *is* the embedding's.  The loss is a *sum* over tokens and comes with their *count*, for the reason in
``mlp``.

Sources: RMSNorm arXiv:1910.07467, rotary embedding arXiv:2104.09864 (the half-split form of Llama), grouped heads
arXiv:2305.13245, SwiGLU arXiv:2002.05202, scaled residual init as in GPT-2, tying arXiv:1608.05859.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.run.models.documents import attention_mask, positions
from plait.tensor import cross_entropy_sum
from plait.tensor.time_axis import TimeAxis

IGNORED = -100  # the target of a position without a loss (the default of ``F.cross_entropy``)
INIT_STD = 0.02  # for initial weights; projections into the residual stream use this / sqrt(2 num_layers)


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.  Raises ValueError if they don't fit together."""

    vocabulary: int = 256
    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden: int | None = None
    """Width inside SwiGLU; None is 8/3 of ``width``, rounded up to a multiple of 32."""
    max_length: int = 128  # tokens of the longest sequence
    dropout: float = 0.1  # the same for embedding, attention and residuals
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} over {self.num_heads} heads is {self.width / self.num_heads:g} each, "
                f"but rotary pairs need an even whole number: make width a multiple of {2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly: "
                f"make num_kv_heads a divisor of {self.num_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: give a probability from 0 up to, not including, 1")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Width inside SwiGLU, in elements, with the default filled in."""
        return self.hidden if self.hidden is not None else -(-8 * self.width // 96) * 32


class Projection(nn.Linear):
    """A linear map without bias; weight [fan_out, fan_in] starts normal with deviation ``std``."""

    def __init__(self, fan_in: int, fan_out: int, std: float = INIT_STD) -> None:
        self.std = std  # nn.Linear.__init__ already calls reset_parameters
        super().__init__(fan_in, fan_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """tokens_BT -> x_BTD, with dropout; weight [vocabulary, width]."""

    weight: nn.Parameter

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, input: Tensor) -> Tensor:
        x_BTD: Tensor = self.dropout(super().forward(input))
        return x_BTD


class TiedHead(nn.Linear):
    """x_BTD -> logits_BTV through a weight [vocabulary, width] that another module owns and initialises."""

    def __init__(self, weight: nn.Parameter) -> None:
        vocabulary, width = weight.shape
        super().__init__(width, vocabulary, bias=False, device="meta")  # no storage: it is replaced at once
        self.weight = weight

    def reset_parameters(self) -> None:
        """Does nothing: drawing here would draw the embedding a second time."""


def rotary_tables(length: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos_TC and sin_TC, fp32 [length, head_dim / 2]: pair c at position t turns by t / base^(2c/head_dim).

    They are computed in fp64 and rounded: in fp32 the last bit depends on the kernel, and two processes differed.
    """
    exponent_C = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency_C = (base ** -exponent_C.double()).float()
    angle_TC = (torch.arange(length, dtype=torch.float32)[:, None] * frequency_C[None, :]).double()
    return angle_TC.cos().float(), angle_TC.sin().float()


def rotate(x_BHTK: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Turns each pair (c, c + K/2) of every head by its position's angle, in x's dtype."""
    cos_TC, sin_TC = cos_TC.to(x_BHTK.dtype), sin_TC.to(x_BHTK.dtype)
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cos_TC - second * sin_TC, second * cos_TC + first * sin_TC), dim=-1)


class Attention(nn.Module):
    """x_BTD -> x_BTD: causal rotary attention; each key/value head serves num_heads / num_kv_heads query heads."""

    cos: Tensor
    sin: Tensor
    time_axis: TimeAxis | None = None
    """The engine sets it if the mesh has a context axis: this rank then has a part of the time steps."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        kv_width = config.num_kv_heads * config.head_dim
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.query = Projection(config.width, config.width)
        self.key = Projection(config.width, kv_width)
        self.value = Projection(config.width, kv_width)
        self.output = Projection(config.width, config.width, std=INIT_STD / math.sqrt(2 * config.num_layers))
        cos_TC, sin_TC = rotary_tables(config.max_length, config.head_dim, config.rope_base)
        self.register_buffer("cos", cos_TC, persistent=False)
        self.register_buffer("sin", sin_TC, persistent=False)

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None = None, position_BT: Tensor | None = None) -> Tensor:
        query_BHTK, key_BGTK = self._heads(self.query(x_BTD)), self._heads(self.key(x_BTD))
        length = query_BHTK.shape[2]  # not x's: sequence parallelism cuts x in time, but its products are whole
        place: Any = slice(length) if position_BT is None else position_BT[:, None]
        if self.time_axis is not None and position_BT is None:
            place = self.time_axis.places(length)
        cos_TC, sin_TC = self.cos[place], self.sin[place]
        query_BHTK, key_BGTK = rotate(query_BHTK, cos_TC, sin_TC), rotate(key_BGTK, cos_TC, sin_TC)
        value_BGTK = self._heads(self.value(x_BTD))
        p = self.dropout if self.training else 0.0
        grouped = query_BHTK.shape[1] != key_BGTK.shape[1]
        if self.time_axis is not None:
            mixed_BHTK = self.time_axis.attention(
                query_BHTK, key_BGTK, value_BGTK, mask_B1TT, dropout_p=p, enable_gqa=grouped
            )
        else:
            causal = mask_B1TT is None
            mixed_BHTK = F.scaled_dot_product_attention(
                query_BHTK, key_BGTK, value_BGTK, mask_B1TT, dropout_p=p, is_causal=causal, enable_gqa=grouped
            )
        out_BTD: Tensor = self.output(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    @property
    def gathered_widths(self) -> tuple[int, int]:
        """Elements of a time step in the keys and the values, which a context axis gathers."""
        width = self.key.out_features
        return width, width

    def _heads(self, x_BTE: Tensor) -> Tensor:
        """[B, T, heads * K] -> [B, heads, T, K], for the heads on this rank."""
        batch, length, width = x_BTE.shape
        return x_BTE.view(batch, length, width // self.head_dim, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """x_BTD -> x_BTD: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = Projection(config.width, config.hidden_width)
        self.up = Projection(config.width, config.hidden_width)
        self.down = Projection(config.hidden_width, config.width, std=INIT_STD / math.sqrt(2 * config.num_layers))

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on the added term."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config)
        self.mlp_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None = None, position_BT: Tensor | None = None) -> Tensor:
        mixed_BTD = self.attention(self.attention_norm(x_BTD), mask_B1TT, position_BT)
        x_BTD = x_BTD + self.attention_dropout(mixed_BTD)
        x_BTD = x_BTD + self.mlp_dropout(self.mlp(self.mlp_norm(x_BTD)))
        return x_BTD


class GPT(nn.Module):
    """The decoder: ``embed``, ``blocks``, ``norm``, ``head``."""

    time_axis: TimeAxis | None = None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = TokenEmbedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = TiedHead(self.embed.weight)

    def tensor_plan(self) -> dict[str, str]:
        """The cut of each module over a tensor axis: attention by heads, the rest of the block by features."""
        columns = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
        stream = ("attention_norm", "attention_dropout", "mlp_norm", "mlp_dropout")
        return {
            "embed": "vocabulary",
            "embed.dropout": "sequence",
            **{f"blocks.*.{name}": "column" for name in columns},
            **{f"blocks.*.{name}": "row" for name in ("attention.output", "mlp.down")},
            **{f"blocks.*.{name}": "sequence" for name in stream},
            "norm": "sequence",
            "head": "vocabulary",
        }

    def pipeline_blocks(self) -> list[str]:
        """The modules in the order in which they run."""
        return ["embed", "blocks", "norm", "head"]

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """tokens_BT int64 -> logits_BTV in the parameters' dtype.  ``documents_BT`` is for packed rows."""
        mask_B1TT, position_BT = None, None
        if documents_BT is not None and self.time_axis is not None:
            axis, mine = self.time_axis, self.time_axis.places(documents_BT.shape[1])
            whole_BT = axis.gather(documents_BT, 1)
            mask_B1TT, position_BT = attention_mask(whole_BT)[:, :, mine], positions(whole_BT)[:, mine]
        elif documents_BT is not None:
            mask_B1TT, position_BT = attention_mask(documents_BT), positions(documents_BT)
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_B1TT, position_BT)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy in nats, summed over the targets that are not ``IGNORED``: a scalar, never a mean.

    ``batch`` has ``tokens`` and ``targets``, and ``documents`` if rows are packed, all int64 [batch, time].  The sum is
    in fp32, or in fp64 if the logits are.
    """
    packed = (batch["documents"],) if "documents" in batch else ()
    logits_BTV: Tensor = model(batch["tokens"], *packed)
    return cross_entropy_sum(logits_BTV, batch["targets"], IGNORED)


def token_count(batch: Mapping[str, Tensor]) -> int:
    """The number of targets in a batch that have a loss."""
    return int((batch["targets"] != IGNORED).sum())
