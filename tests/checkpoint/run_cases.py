"""Cases of checkpoints: a decoder with all that a checkpoint has, layouts, and a run on its batches.

The decoder has a tied embedding, dropout, odd sizes, a frozen weight and two buffers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.load import Loaded, load
from plait.checkpoint.save import save
from plait.comm import Comm
from plait.run.models.gpt import GPT, GPTConfig, loss_sum, token_count
from plait.step import EMA, Engine
from plait.table.cells import TABLE
from plait.table.precision import LossScale

SIZES = GPTConfig(vocabulary=13, num_layers=4, width=24, num_heads=6, num_kv_heads=6, hidden=11, max_length=8)
OFFLOADED = TABLE["zero3"].mixed("bf16").offloaded()

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("shard=2", {"strategy": "ddp"}),
    "zero1": ("shard=3", {"strategy": "zero1"}),
    "zero3": ("shard=3", {"strategy": "zero3"}),
    "zero3 on 4": ("shard=4", {"strategy": "zero3"}),
    "psdp": ("replica=2 shard=2", {"strategy": "psdp"}),
    "tensors": ("shard=3", {"strategy": "zero3", "cut": "tensor"}),
    "tensor": ("tensor=2 shard=2", {"strategy": "zero3"}),
    "pipe": ("pipe=2 shard=2", {"strategy": "zero3", "schedule": "interleaved"}),
    "zbv": ("pipe=2", {"strategy": "ddp", "schedule": "zbv"}),
    "bf16": ("shard=2", {"strategy": TABLE["zero3"].mixed("bf16")}),
    "fp16": ("shard=3", {"strategy": TABLE["zero1"].mixed("fp16"), "loss_scale": LossScale(8.0, interval=2)}),
    "offload": ("shard=2", {"strategy": OFFLOADED}),
}


def decoder() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    model = GPT(SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.blocks[1].requires_grad_(False).bfloat16().float()  # what never trains has no fp32 copy under a 16-bit row
    model.norm.register_buffer("seen", torch.tensor([3, 1, 2]))
    model.embed.register_buffer("mask", torch.tensor([[0.5, -torch.inf]]))
    return model


def optimizers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices[:3], "weight_decay": 0.2}, {"params": matrices[3:], "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)


def batches(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for _ in range(steps):
        tokens = torch.randint(0, 13, (13, 8), generator=generator)
        made.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    return made


@dataclass
class Training:
    """An engine with two optimizers, a schedule and an average, on one rank."""

    engine: Engine
    ema: EMA
    schedule: Any
    losses: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, comm: Comm, where: str, change: int = 0) -> Training:
        model = decoder()
        with torch.no_grad():
            for value in model.state_dict().values():
                value.add_(change)  # a load that leaves anything out is seen
        first, second = optimizers_of(model)
        engine = Engine(
            model,
            comm,
            optimizer=[first, second],
            loss_fn=loss_sum,
            count_fn=token_count,
            clip=1.0,
            **LAYOUTS[where][1],
        )
        schedule = torch.optim.lr_scheduler.MultiStepLR(first, [2, 3, 5], gamma=0.5)
        return cls(engine, EMA(engine, 0.9), schedule)

    def go(self, first: int, last: int) -> list[float]:
        comm = self.engine.comm
        losses = []
        for batch in batches(last)[first:]:
            parts = {name: t.tensor_split(comm.mesh.data_size * 2) for name, t in batch.items()}
            begin = comm.data_rank * 2
            losses.append(self.engine.step([{n: p[begin + m] for n, p in parts.items()} for m in range(2)]).loss)
            self.schedule.step()
            self.ema.update()
        return losses

    def save(self, path: Path) -> Path:
        return save(path, self.engine, ema=self.ema, extra={"schedule": self.schedule.state_dict(), "at": (1, None)})

    def load(self, path: Path) -> Loaded:
        loaded = load(path, self.engine, ema=self.ema)
        self.schedule.load_state_dict(loaded.extra["schedule"])
        return loaded

    def state(self) -> Any:
        """Everything, whole, in memory of its own."""
        engine = self.engine
        whole = engine.full_state_dict(), self.ema.full_state_dict(), engine.optimizer_state_dict()
        return copy.deepcopy((*whole, engine.step_state(), self.schedule.state_dict(), self.ema.decay))


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """The places where two nested values differ, in a bit or a type."""
    if isinstance(theirs, Tensor):
        same = isinstance(ours, Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return [] if same else [where]
    if type(ours) is not type(theirs):
        return [f"{where}: {type(ours).__name__} for {type(theirs).__name__}"]
    if isinstance(theirs, dict):
        keys = [*ours, *(key for key in theirs if key not in ours)]
        missing = object()
        return [d for k in keys for d in differences(ours.get(k, missing), theirs.get(k, missing), f"{where}/{k}")]
    if isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return [f"{where}: {len(ours)} for {len(theirs)}"]
        return [d for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for d in differences(a, b, f"{where}/{i}")]
    return [] if ours == theirs else [f"{where}: {ours} for {theirs}"]
