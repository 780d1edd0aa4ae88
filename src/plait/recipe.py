"""How the weights are updated: torch's optimizer, which of them decay, and the learning rate of each step.

    lr    1 |    ____                    constant
            |   /    ````--..__          linear, to min_lr
            |  /               ``--.__
     min_lr | /
          0 +-------------------------->  step
             warmup          steps

All of it is stock torch on the parameters it is given, so that a layout and the single process that it is held
against get the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from plait.config import RunConfig

STATES = {"adamw": 2, "adam": 2, "sgd": 1}
"""Numbers of a parameter's size that each optimizer keeps (SGD here has momentum)."""


def make_optimizer(config: RunConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer of a config: one group, or with ``weight_decay`` two, of which the first decays.

    What decays is what has two dims or more: matrices, and with them embeddings, which are the head's matrix where the
    weight is tied.  Norms and biases have one dim and do not (GPT-3; Brown et al. 2020).
    """
    groups = list(parameters) if config.weight_decay is None else decay_groups(parameters, config.weight_decay)
    match config.optimizer:
        case "adamw":
            return AdamW(groups, lr=config.lr)
        case "adam":
            return Adam(groups, lr=config.lr)
        case "sgd":
            return SGD(groups, lr=config.lr, momentum=0.9)


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Two parameter groups: what has two dims or more decays, the rest does not."""
    every = list(parameters)
    return [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_scheduler(config: RunConfig, optimizer: Optimizer) -> LRScheduler:
    """The learning rate of each step: torch's scheduler on the optimizer, to be stepped after it."""
    factor = partial(
        lr_factor, schedule=config.lr_schedule, warmup=config.warmup, steps=config.steps, min_lr=config.min_lr
    )
    return LambdaLR(optimizer, factor)


def lr_factor(step: int, *, schedule: str, warmup: int, steps: int, min_lr: float) -> float:
    """What the learning rate of a step (from 0) is multiplied by.

    It grows in equal parts over the first ``warmup`` steps, the last of which has the full rate, and then falls so that
    ``min_lr`` would be that of step ``steps`` (torch's ``LinearLR`` and ``CosineAnnealingLR``, one after the other).
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    way = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = 1 - way if schedule == "linear" else (1 + math.cos(math.pi * way)) / 2
    return min_lr + (1 - min_lr) * left
