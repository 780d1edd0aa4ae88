"""A *contestant* is a name and a ``step(batch)`` that trains its own copy of the model and returns the loss."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.models import Batch, Workload

if TYPE_CHECKING:
    from plait.comm.process import ProcessComm
    from plait.table.mesh import Mesh


@dataclass
class Contestant:
    """One engine training one copy of the model."""

    step: Callable[[Batch], Tensor | float]
    """Trains on this rank's samples, returns the loss."""
    loss_is_global: bool
    """True: the loss already counts every rank; False: it is this rank's mean."""
    loss_rank: int = 0
    """The rank that knows a global loss; what ``step`` returns on others is not read."""
    communicates: bool = True
    """False for one whose ranks never talk: after the first step its weights are its own."""
    finish: Callable[[], None] = lambda: None
    """Waits for the unfinished work of the last step, so that the clock counts it."""


SHARED = "plait/shm"
"""Rows whose ranks share memory; the others' are joined by gloo."""

COMPILED = "plait/compiled"
"""Rows whose blocks are compiled, joined by gloo."""

TRANSPORTS = ("plait", SHARED)
"""The first words of plait's uncompiled rows."""

Build = Callable[..., Contestant]
"""(workload, number of ranks) -> a contestant, inside an initialised process group."""


def adamw(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    """The optimizer of every contestant; ``parameters`` may be groups."""
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01, fused=True)


def training_loop(
    workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: int = 1
) -> Callable[[Batch], Tensor]:
    """The training loop that every PyTorch user writes; with several microbatches gradients are added."""

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for part in zip(*(t.chunk(microbatches) for t in batch), strict=True):
            loss = workload.loss_mean(model, part) / microbatches
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).sum()

    return step


def alone(workload: Workload, microbatches: int = 1) -> Contestant:
    """One process and one thread with the whole batch; the other ranks wait at the next barrier."""
    if dist.get_rank() > 0:
        return Contestant(lambda batch: 0.0, loss_is_global=True)
    model = workload.build()
    optimizer = adamw(model.parameters(), workload.learning_rate)
    return Contestant(training_loop(workload, model, optimizer, microbatches), loss_is_global=True)


def comm_beside(mesh: Mesh, name: str, *, shared_memory: bool = False) -> ProcessComm:
    """plait's world on the process group that torch's engines use too, with a name of its own in the store."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    from plait.comm.process import ProcessComm
    from plait.comm.process_identity import Peer

    process_ids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(process_ids, os.getpid())
    peers = [Peer(rank, socket.gethostname(), process_id) for rank, process_id in enumerate(process_ids)]
    store = PrefixStore(name, _get_default_store())
    return ProcessComm(mesh, dist.get_rank(), store, peers, shared_memory=shared_memory)
