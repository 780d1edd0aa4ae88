"""The contestants that train: torch's engines and a single process, each with and without a witness."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness.contestants import Contestant, adamw, training_loop
from harness.models import Block, Workload, decoder, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plait

MANY = 100_000
"""Steps that a witness writes: more than any run has."""

RECORDINGS: dict[str, dict[str, Any] | None] = {"none": None, "whole": {}}
"""The arguments of ``plait.witness``, by the name of the row; None: there is no witness."""


WORKLOADS = {w.name: w for w in (decoder(Block, 256, 1), mlp("mlp1024", 8, 4))}


def single(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


ENGINES: dict[str, tuple[Callable[[nn.Module], nn.Module], int]] = {
    "single": (single, 1),
    "ddp": (ddp, 2),
    "fsdp2": (fsdp2, 2),
}
"""The wrapper of a model, and the number of ranks."""


HOOKS = ("_forward", "_before", "_after", "loss")
"""The calls that a witness adds to a loop."""


@dataclass
class Witnessed:
    """A contestant, the folder in which its rank writes, and the processor's seconds inside the witness so far."""

    contestant: Contestant
    place: Path | None
    inside: float = 0.0

    def timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*call: Any) -> None:
            start = time.thread_time()
            hook(*call)
            self.inside += time.thread_time() - start

        return wrapper

    def clean(self) -> int:
        """Removes the steps that are there; the bytes of one."""
        sizes = []
        for file in self.place.glob("step-*") if self.place else ():
            sizes.append(file.stat().st_size)
            file.unlink()
        return max(sizes, default=0)


def contestant(workload: Workload, engine: str, recording: str, folder: str) -> Witnessed:
    """Inside a process group: a copy of the model, trained from now on under a witness or not."""
    model = ENGINES[engine][0](workload.build())
    optimizer = adamw(model.parameters(), workload.learning_rate)
    step = training_loop(workload, model, optimizer)
    settings = RECORDINGS[recording]
    if settings is None:
        return Witnessed(Contestant(step, loss_is_global=False), None)
    place = Path(folder) / recording
    seen = plait.witness(model, optimizer, place, steps=MANY, **settings)

    made = Witnessed(Contestant(step, loss_is_global=False), place / f"rank-{dist.get_rank():05d}")
    for hook in HOOKS:
        setattr(seen, hook, made.timed(getattr(seen, hook)))
    seen.__enter__()  # for as long as the process lives
    return made
