"""Jobs of the silent bugs: a small model of everything that they are about, and a chain for pipelines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.referee.witness.engines import Driven
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import Job

TOKENS, WIDTH, TIME, SAMPLES = 11, 8, 6, 8


class Small(nn.Module):
    """A norm, a key that all heads share, a gate, three experts, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.part = slice(0, TIME)
        self.routed = True
        self.of_head: list[Tensor] = []
        """The tied weight's gradients through the head, forward by forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)[:, self.part]
        x = x + torch.tanh(self.key(self.norm(x)))
        weights = self.gate(x).softmax(-1)
        if not self.routed:
            weights = weights.detach()
        y = torch.stack([expert(x) for expert in self.experts], -1)
        x = x + (y * weights[:, :, None, :]).sum(-1)
        head = self.embed.weight * 1
        if head.requires_grad:
            head.register_hook(self.of_head.append)
        return F.linear(x, head)


def text(step: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Sequences of which 1 to 6 tokens are targets: no two microbatches have equally many."""
    random = torch.Generator().manual_seed(step)
    inputs = torch.randint(tokens, (SAMPLES, TIME), generator=random)
    targets = torch.randint(TOKENS, (SAMPLES, TIME), generator=random)
    lengths = torch.tensor([6, 5, 2, 1, 4, 3, 6, 4])
    return {"tokens": inputs, "targets": targets.masked_fill(torch.arange(TIME) >= lengths[:, None], -100)}


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor], part: slice = slice(None)) -> Tensor:
    logits, targets = model(batch["tokens"]), batch["targets"][:, part]
    return F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1), ignore_index=-100, reduction="sum")


def num_targets(batch: Mapping[str, Tensor]) -> int:
    return int((batch["targets"] >= 0).sum())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


JOB = plait.UserJob(Small, loss_sum, text, num_targets, adam)


def deep() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def points(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, WIDTH, generator=random), torch.randn(SAMPLES, WIDTH, generator=random)


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def num_points(batch: tuple[Tensor, Tensor]) -> int:
    return len(batch[1])


CHAIN = plait.UserJob(deep, squares, points, num_points, adam)


LIST = Path(__file__).with_name("silent_bugs.py")


@dataclass(frozen=True)
class Bug:
    """A published bug, and what has to be said of it."""

    adapter: Callable[[Job, nn.Module, Comm], Driven]
    threads: str
    name: str
    """Begins the name of the parameter."""
    factor: float | None
    words: str
    """A part of the verdict."""
    mesh: str = "shard=2"
    clip: float | None = None

    @property
    def config(self) -> VerifyConfig:
        job = CHAIN if self.mesh.startswith("pipe") else JOB
        return VerifyConfig(
            job=job, engine=f"{LIST}:{self.adapter.__name__}", mesh=self.mesh, clip=self.clip, batch=SAMPLES,
            microbatches=2, steps=2, dropout=0.0,
        )  # fmt: skip
