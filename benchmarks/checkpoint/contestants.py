"""The contestants that save and load: plait's zero3 with its own checkpoints, FSDP2 with torch.distributed.checkpoint.

Both train the same decoder with AdamW, so a rank of either has half of the parameters and of their two moments.  Each
saves everything that a resumed run needs from these calls, and loads it back into model and optimizer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.contestants import adamw, comm_beside
from harness.models import Workload
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import plait
from plait.table.mesh import Mesh


class Keeper(Protocol):
    """A contestant.  ``folder`` is the same each time, and empty before a save."""

    def step(self) -> None:
        """One step of training, so that there is something new to save."""

    def tensors(self) -> list[Tensor]:
        """This rank's part of parameters and optimizer state."""

    def save(self, folder: Path) -> None:
        """Returns when the disk has it."""

    def begin(self, folder: Path) -> None:
        """Begins to save; the weights may change when it returns."""

    def wait(self) -> None:
        """Returns when the save that was begun is on the disk."""

    def load(self, folder: Path) -> None:
        """Loads the save."""


class Ours:
    """plait, every byte hashed at a save and at a load."""

    def __init__(self, workload: Workload) -> None:
        self.comm = comm_beside(Mesh(shard=dist.get_world_size()), "checkpoint")
        self.model = workload.build()
        optimizer = adamw(self.model.parameters(), workload.learning_rate)
        self.engine = plait.Engine(self.model, self.comm, strategy="zero3", optimizer=optimizer)
        self.batch, self.workload = workload.batch(0, dist.get_rank(), dist.get_world_size()), workload
        self.optimizer = optimizer
        self.saver: plait.Saver | None = None

    def step(self) -> None:
        self.engine.backward(self.workload.loss_sum(self.model, self.batch), self.workload.count(self.batch))
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        return [piece.tensor.detach() for piece in self.engine.placed.pieces()]

    def save(self, folder: Path) -> None:
        plait.save(folder, self.engine)

    def begin(self, folder: Path) -> None:
        if self.saver is None:  # one for the whole run, as a training loop has it
            self.saver = plait.Saver(folder, self.engine)
        self.saver.save()

    def wait(self) -> None:
        assert self.saver is not None
        self.saver.wait()

    def load(self, folder: Path) -> None:
        plait.load(folder, self.engine)


class Theirs(Stateful):
    """torch.distributed.checkpoint; files are flushed, nothing is hashed.

    Args:
        reuse: the copies of an asynchronous save go into memory that is kept, which is not the default.
    """

    def __init__(self, workload: Workload, *, reuse: bool = False) -> None:
        self.model, mesh = workload.build(), init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = adamw(self.model.parameters(), workload.learning_rate)
        self.batch, self.workload = workload.batch(0, dist.get_rank(), dist.get_world_size()), workload
        self.stager = DefaultStager(StagingOptions(False, False, False, False)) if reuse else None
        self.group = dist.new_group(backend="gloo")  # for the threads, whose messages would meet those of the training
        self.future: Future[Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.workload.loss_mean(self.model, self.batch))
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        states = [v for own in self.optimizer.state.values() for v in own.values() if isinstance(v, Tensor) and v.dim()]
        return [t.detach().to_local() for t in (*self.model.parameters(), *states)]  # type: ignore[attr-defined]

    def save(self, folder: Path) -> None:
        dcp.save({"app": self}, checkpoint_id=folder)

    def begin(self, folder: Path) -> None:
        found = dcp.async_save({"app": self}, checkpoint_id=folder, process_group=self.group, async_stager=self.stager)
        assert isinstance(found, Future)
        self.future = found

    def wait(self) -> None:
        assert self.future is not None
        self.future.result()

    def load(self, folder: Path) -> None:
        dcp.load({"app": self}, checkpoint_id=folder)


CONTESTANTS: dict[str, Callable[[Workload], Keeper]] = {
    "plait": Ours,
    "torch DCP": Theirs,
    "torch DCP, copies kept": lambda workload: Theirs(workload, reuse=True),
}


def emptied(folder: Path) -> Path:
    """An empty folder of this name; all ranks call it together."""
    dist.barrier()
    if not dist.get_rank():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    return folder


def spoil(tensors: list[Tensor]) -> None:
    """So that a load that does nothing is seen."""
    for tensor in tensors:
        tensor.fill_(7)


def copies(tensors: list[Tensor]) -> Iterator[Tensor]:
    return (tensor.clone() for tensor in tensors)
