"""Updates of the weights: torch's optimizer, the groups that decay, and the learning rate of each step.

    lr    1 |    ____                    constant
            |   /    ````--..__          linear, to min_lr
            |  /               ``--.__
     min_lr | /
          0 +-------------------------->  step
             warmup          steps

All of it is stock torch, so a layout and the single process that it is compared with use the same updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tyro
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from plait.messages.wording import did_you_mean


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, and its learning rate."""

    optimizer: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(OPTIMIZERS)}; sgd has momentum 0.9.")] = "adamw"
    lr: float = 3e-3
    """The learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warmup: linear and cosine fall to min_lr."""
    warmup: int = 0
    """Steps in which the learning rate grows to lr, in equal parts."""
    min_lr: float = 0.1
    """The end of linear and cosine, as a fraction of lr."""
    weight_decay: float | None = None
    """Decay of matrices and embeddings, but not of norms and biases; None: torch's default, for all."""
    clip: float | None = 1.0
    """The largest global gradient norm; None does not clip."""
    loss_scale: float | None = None
    """The first factor of the loss, which follows the gradients from then on; None: 65536 for fp16, 1 otherwise."""


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer, with its properties that other code needs."""

    make: Callable[..., Optimizer]
    """Makes it from parameters, or parameter groups, and ``lr``."""
    states: int
    """Number of tensors of a parameter's size that it keeps."""
    amplifies: bool
    """True if it divides by the size of the gradient, so that rounding a small gradient can change a whole step."""


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(AdamW, states=2, amplifies=True),
    "adam": OptimizerRow(Adam, states=2, amplifies=True),
    "sgd": OptimizerRow(partial(SGD, momentum=0.9), states=1, amplifies=False),
}
"""Every optimizer.  A new one is a row: ``OPTIMIZERS["mine"] = OptimizerRow(...)``."""


def find_optimizer(name: str) -> OptimizerRow:
    """Finds the row of an optimizer.  Raises ValueError, with the nearest names, if there is none."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    hint = did_you_mean(name, OPTIMIZERS, f"choose one of {', '.join(OPTIMIZERS)}")
    raise ValueError(f"unknown optimizer {name!r}: {hint}")


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Makes the optimizer of a config: one group, or two with ``weight_decay``: matrices decay, and so embeddings,
    which are the head's matrix if the weight is tied.  Norms and biases have one dim and do not (GPT-3; Brown et al.
    2020)."""
    groups: Any = list(parameters)
    if config.weight_decay is not None:
        groups = [
            {"params": [p for p in groups if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in groups if p.dim() < 2], "weight_decay": 0.0},
        ]
    return find_optimizer(config.optimizer).make(groups, lr=config.lr)


def make_scheduler(config: OptimizerConfig, steps: int, optimizer: Optimizer) -> LRScheduler:
    """Makes torch's scheduler of the learning rate over ``steps``.  The caller steps it after the optimizer."""
    factor = partial(lr_factor, schedule=config.lr_schedule, warmup=config.warmup, steps=steps, min_lr=config.min_lr)
    return LambdaLR(optimizer, factor)


def lr_factor(step: int, *, schedule: str, warmup: int, steps: int, min_lr: float) -> float:
    """The factor of the learning rate in a step (from 0).

    It grows in equal parts over the first ``warmup`` steps, the last of which has the full rate, and then falls so that
    it would be ``min_lr`` at step ``steps`` (torch's ``LinearLR``, then ``CosineAnnealingLR``).
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = 1 - share if schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return min_lr + (1 - min_lr) * left
