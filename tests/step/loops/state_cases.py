"""What the tests of optimizer state share: layouts, an optimizer with groups, and when two states are one."""

from __future__ import annotations

import copy
from typing import Any

import engine_cases as cases
import torch
from engine_cases import batches, count, deal, loss_sum
from torch import nn

from plait.comm import Comm
from plait.step import Engine


def chain() -> nn.Module:
    return cases.distinct(nn.Sequential(*(cases.Block() for _ in range(4))))


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with options of their own, and a schedule's."""
    parameters = list(model.named_parameters())
    decayed = [p for n, p in parameters if p.dim() > 1]
    others = [p for n, p in parameters if p.dim() < 2]
    own = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 0.02}]
    made = torch.optim.AdamW(own, lr=0.01, eps=1e-4)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5)
    return made


def state_equal(ours: Any, theirs: Any, close: float = 0.0) -> None:
    """All of two states, groups in any order."""
    assert ours["state"].keys() == theirs["state"].keys()
    for name, values in theirs["state"].items():
        assert ours["state"][name].keys() == values.keys(), name
        for key, value in values.items():
            mine = torch.as_tensor(ours["state"][name][key])
            assert mine.shape == torch.as_tensor(value).shape, (name, key)
            assert cases.close(mine, torch.as_tensor(value), close), (name, key)
    for mine, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert mine == other


def plainly(template: nn.Module, make: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = copy.deepcopy(template)
    optimizer = make(model)
    for batch in batches(steps):
        optimizer.zero_grad()
        (loss_sum(model, batch) / count(batch)).backward()
        optimizer.step()
    return model, optimizer


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("shard=1", {"strategy": "ddp"}),
    "ddp": ("shard=2", {"strategy": "ddp"}),
    "zero1": ("shard=3", {"strategy": "zero1"}),
    "zero2 tensors": ("shard=2", {"strategy": "zero2", "cut": "tensor"}),
    "zero3": ("shard=3", {"strategy": "zero3"}),
    "zero3 tensors": ("shard=3", {"strategy": "zero3", "cut": "tensor"}),
    "hsdp": ("replica=2 shard=2", {"strategy": "hsdp"}),
    "psdp": ("replica=2 shard=2", {"strategy": "psdp"}),
    "cpu": ("shard=2", {"strategy": "off: shard/replica | shard/replica | shard/replica | shard/replica @cpu"}),
    "pipe": ("pipe=2 shard=2", {"strategy": "zero3"}),
}


def build(comm: Comm, where: str, make: Any = groups) -> Engine:
    model = chain()
    return Engine(model, comm, optimizer=make(model), loss_fn=loss_sum, count_fn=count, **LAYOUTS[where][1])


def go(engine: Engine, first: int, last: int) -> list[float]:
    """Steps on the same global batches; one microbatch."""
    comm = engine.comm
    return [engine.step(deal(batch, comm.mesh, comm.rank, 1)).loss for batch in batches(last)[first:]]
