"""A small ResNet of transformers, for ``plait verify --engine ... --job tests/witness/resnet_jobs.py:NAME``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

import plait
from plait.comm import Comm
from plait.referee.witness.engines import Driven, loop
from plait.run.job.job import Job
from plait.step.batch_norm import synchronise

SAMPLES, CLASSES = 12, 5


class Frozen(nn.BatchNorm2d):
    """Normalises by its running statistics, also while the model trains."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def frozen(norm: nn.BatchNorm2d) -> nn.Module:
    module = Frozen(norm.num_features)
    assert module.running_mean is not None and module.running_var is not None
    nn.init.normal_(module.running_mean, std=0.1)
    nn.init.uniform_(module.running_var, 0.5, 2.0)
    return module


def resnet() -> nn.Module:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=CLASSES)
    return ResNetForImageClassification(config)


def resnet_with(make: Callable[[nn.BatchNorm2d], nn.Module]) -> nn.Module:
    """The same, with another norm in the place of each BatchNorm."""
    model = resnet()
    for name, norm in [(name, m) for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]:
        around, _, last = name.rpartition(".")
        setattr(model.get_submodule(around), last, make(norm))
    return model


def images(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 3, 16, 16, generator=random), torch.randint(CLASSES, (SAMPLES,), generator=random)


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="sum")


with_batch_norm = plait.UserJob(resnet, loss_sum, images)
with_frozen = plait.UserJob(lambda: resnet_with(frozen), loss_sum, images)
with_groups = plait.UserJob(lambda: resnet_with(lambda norm: nn.GroupNorm(2, norm.num_features)), loss_sum, images)
synchronised = plait.UserJob(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(resnet()), loss_sum, images)


def by_hand(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Gradients are summed, and SyncBatchNorm is plait's: torch's own, and DDP around it, need a GPU."""
    synchronise(model.modules(), comm)
    optimizer = job.optimizer(model.parameters())

    def sums(*call: Any) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    optimizer.register_step_pre_hook(sums)
    return Driven(model, optimizer, loop(job, model, optimizer, 1))


def no_sum(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """No gradient is sent, whatever the norm is."""
    optimizer = job.optimizer(model.parameters())
    return Driven(model, optimizer, loop(job, model, optimizer, 1))
