"""Puts a training loop under plait's witness, and asks its judge whether the loop is the run of one process."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import plait

Loop = Callable[[nn.Module, torch.optim.Optimizer, plait.Comm], None]


def verdict(
    loop: Loop,
    model: nn.Module,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    loss_sum: Callable[[nn.Module, Tensor], Tensor],
    x: Tensor,
    mesh: str = "shard=1",
) -> str:
    """Runs a loop on every rank and returns the judge's verdict of it.

    Args:
        loss_sum: the loss of some samples, summed over them; the loop is to train with its mean.
        x: the samples of every step, on all ranks together.
    """
    job = plait.UserJob(
        build=lambda: copy.deepcopy(model),
        loss_fn=loss_sum,
        count_fn=len,
        batches=lambda step: x,
        optimizer=optimizer,
    )
    dtype = "fp64" if x.dtype is torch.float64 else "fp32"
    with tempfile.TemporaryDirectory() as folder:

        def body(comm: plait.Comm) -> None:
            ours = copy.deepcopy(model)
            updates = optimizer(ours.parameters())
            with plait.witness(ours, updates, folder, rank=comm.rank, ranks=comm.world_size):
                loop(ours, updates, comm)

        plait.run_threads(mesh, body)
        return str(plait.judge(job, folder, dtype=dtype))
