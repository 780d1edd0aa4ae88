"""The decoder of ``gpt`` with a mixture of experts instead of each SwiGLU.

    x_TD -> router -> the top experts of each token -> the weighted sum of their outputs, plus a shared expert

Unless experts have a capacity (``within_capacity``), no token is dropped.  The router's weights are a softmax over all
experts, divided by the sum over the chosen.  Two losses regulate it.  They travel with the activation, as one extra
number, and ``loss_sum`` adds them:

    balance   experts * sum over experts of (share of the choices) * (mean probability)     for each sample
    z         the square of the log-sum-exp of a token's logits                             for each token

Each is multiplied by its weight, and ``balance`` also by the sample's tokens, since the loss is a sum over targets.  A
balance over whole microbatches would depend on the cut of the batch.

Sources: Switch Transformers (Fedus et al. 2021), ST-MoE (Zoph et al. 2022), Mixtral (Jiang et al. 2024),
DeepSeekMoE (Dai et al. 2024), DeepSeek-V3 (2024).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.run.models.gpt import GPT, IGNORED, INIT_STD, Block, GPTConfig, Projection, SwiGLU, TiedHead
from plait.tensor import cross_entropy_sum
from plait.tensor.expert_axis import ExpertAxis, run_experts, within_capacity


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """The sizes of a GPT with experts.  Raises ValueError if they don't fit together."""

    num_experts: int = 8
    num_chosen: int = 2
    """Experts of a token."""
    shared: bool = True
    """True if every token also goes through one shared expert."""
    balance_weight: float = 0.01
    z_weight: float = 0.001
    capacity: float | None = None
    """Tokens of a sample that an expert takes, as a multiple of an even share; None: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ValueError(f"{self.num_chosen} of {self.num_experts} experts for each token: choose from 1 to all")


class Experts(nn.Module):
    """SwiGLU for each token by its experts: gate and up as one, [experts, 2 * hidden, width], and down."""

    expert_axis: ExpertAxis | None = None
    """The engine sets it if ranks share the experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.hidden_width, config.width))
        self.down = nn.Parameter(torch.empty(config.num_experts, config.width, config.hidden_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up, std=INIT_STD)
        nn.init.normal_(self.down, std=INIT_STD / math.sqrt(2 * self.config.num_layers))

    def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        if self.expert_axis is None:
            return run_experts(self._run, x_TD, expert_TK, weight_TK, 0, self.config.num_experts)
        return self.expert_axis.experts(self._run, self.config.num_experts, x_TD, expert_TK, weight_TK)

    @property
    def expert_widths(self) -> tuple[int, int]:
        """The width of a token, and its number of experts, for the prediction of messages."""
        return self.config.width, self.config.num_chosen

    def _run(self, x_RD: Tensor, expert_R: Tensor) -> Tensor:
        """Computes each row by its expert, with the rows of an expert together."""
        order = expert_R.argsort(stable=True)
        counts = expert_R.bincount(minlength=len(self.gate_up)).tolist()
        out = []
        for rows, gate_up, down in zip(x_RD[order].split(counts), self.gate_up, self.down, strict=True):
            gate, up = F.linear(rows, gate_up).chunk(2, -1)
            out.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(out)[order.argsort()]


class MixtureOfExperts(nn.Module):
    """x_BTD -> x_BTD and the losses of the router; replaces a ``SwiGLU``."""

    expert_axis: ExpertAxis | None = None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Projection(config.width, config.num_experts)
        self.experts = Experts(config)
        self.shared = SwiGLU(config) if config.shared else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        logits_BTE = self.router(x_BTD)
        logits_BTE = logits_BTE.to(torch.promote_types(logits_BTE.dtype, torch.float32))
        share_BTE = logits_BTE.softmax(-1)
        weight_BTK, expert_BTK = share_BTE.topk(self.config.num_chosen)
        weight_BTK = (weight_BTK / weight_BTK.sum(-1, keepdim=True)).to(x_BTD.dtype)
        goes_BTK = expert_BTK
        if self.config.capacity is not None:
            goes_BTK = within_capacity(expert_BTK, self.config.num_experts, self.config.capacity, self.expert_axis)
        out_TD = self.experts(*(every.flatten(0, 1) for every in (x_BTD, goes_BTK, weight_BTK)))
        out_BTD: Tensor = out_TD.view_as(x_BTD)
        if self.shared is not None:
            out_BTD = out_BTD + self.shared(x_BTD)
        return out_BTD, self.losses(logits_BTE, share_BTE, expert_BTK) if self.training else logits_BTE.new_zeros(())

    @property
    def counted_experts(self) -> tuple[int, bool]:
        """The number of experts whose tokens it counts, and True if they may be full; it predicts messages."""
        return self.config.num_experts, self.config.capacity is not None

    def losses(self, logits_BTE: Tensor, share_BTE: Tensor, expert_BTK: Tensor) -> Tensor:
        """This rank's terms of the two losses, summed over its tokens."""
        config, axis = self.config, self.expert_axis
        chosen_BE = F.one_hot(expert_BTK, config.num_experts).sum((1, 2)).to(share_BTE)
        if axis is not None:  # other ranks may have other tokens of these samples
            chosen_BE = axis.over_sample(chosen_BE)
        part_BE = chosen_BE / chosen_BE.sum(1, keepdim=True)
        balance = config.num_experts * (part_BE * share_BTE.sum(1)).sum()
        loss = config.balance_weight * balance + config.z_weight * logits_BTE.logsumexp(-1).square().sum()
        return loss if axis is None else axis.whole_loss(loss)


Carry = tuple[Tensor, Tensor]
"""The activation, and the routers' losses so far."""


class MoEBlock(Block):
    """A block whose ``mlp`` is a mixture; the first one in the model gets only an activation."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.mlp = MixtureOfExperts(config)  # type: ignore[assignment]

    def forward(self, carry: Tensor | Carry, *places: Tensor | None) -> Carry:  # type: ignore[override]
        x_BTD, loss = carry if isinstance(carry, tuple) else (carry, carry.new_zeros((), dtype=torch.float32))
        x_BTD = x_BTD + self.attention_dropout(self.attention(self.attention_norm(x_BTD), *places))
        out_BTD, more = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + self.mlp_dropout(out_BTD), loss + more


class MoENorm(nn.RMSNorm):
    """The norm before the head, which passes the losses on."""

    def forward(self, carry: Carry) -> Carry:  # type: ignore[override]
        return super().forward(carry[0]), carry[1]


class MoEHead(TiedHead):
    """The head, which passes the losses on."""

    def forward(self, carry: Carry) -> Carry:  # type: ignore[override]
        return super().forward(carry[0]), carry[1]


class MoE(GPT):
    """The decoder: tokens_BT -> logits_BTV and the losses of its routers."""

    config: MoEConfig

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(MoEBlock(config) for _ in range(config.num_layers))
        self.norm = MoENorm(config.width, eps=config.norm_eps)
        self.head = MoEHead(self.embed.weight)

    def tensor_plan(self) -> dict[str, str]:
        """The cut of each module over a tensor axis; the experts are shared among its ranks without being named."""
        plan = {name: style for name, style in super().tensor_plan().items() if not name.startswith("blocks.*.mlp.")}
        shared = {"gate": "column", "up": "column", "down": "row"} if self.config.shared else {}
        return (
            plan
            | {"blocks.*.mlp.router": "sequence"}
            | {f"blocks.*.mlp.shared.{name}": style for name, style in shared.items()}
        )


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of ``gpt.loss_sum``, with the losses of the routers."""
    packed = (batch["documents"],) if "documents" in batch else ()
    logits_BTV, losses = model(batch["tokens"], *packed)
    loss: Tensor = cross_entropy_sum(logits_BTV, batch["targets"], IGNORED) + losses
    return loss
