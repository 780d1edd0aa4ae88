"""Measures the cost of each block of a model, so that stages can be balanced by it.

Each block in turn runs as a stage in this process, forward and backward.  So the parameters of only one block exist at
a time, and its cost includes everything else that a stage does (rotary tables, masks, hooks).
"""

import copy
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Comm, ThreadWorld
from plait.forward.context import RNGPosition, token_counts
from plait.pipeline.blocks import blocks_of, cut
from plait.pipeline.build_stages import lay_stages
from plait.pipeline.message import Handed
from plait.pipeline.stage import LossFn, StageSettings
from plait.table.cells import TABLE
from plait.table.collectives import Note
from plait.table.mesh import AXES, Mesh
from plait.table.parallelism import Parallelism, Recompute
from plait.tensor import Parallel
from plait.zero.build import SourceModel

Seconds = tuple[tuple[float, ...], tuple[float, ...]]
"""Seconds of the forward and of the backward, block by block."""


def block_costs(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    num_samples: int,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    recompute: Recompute | None = None,
) -> Iterator[tuple[float, float]]:
    """Measures seconds of forward and backward of each block on one microbatch: medians without the first round.

    Args:
        model: its parameters may be on meta; it is not changed.
        batch: a microbatch of the run, with ``num_samples`` samples, on the device.
        recompute: as in the run.
    """
    count = len(blocks_of(model))
    comm = ThreadWorld(Mesh(), device=device).comm(0)
    position = RNGPosition(0, 0, 0, num_samples, token_counts(batch, num_samples))
    parallelism = Parallelism(TABLE["ddp"], recompute=recompute)
    received: Handed | None = None
    for index in range(count):
        fresh = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
        copied: nn.Module = copy.deepcopy(model, fresh)  # values are shared, or on meta
        whole = SourceModel(copied, {id(p): n for n, p in copied.named_parameters()})
        parts = {index: cut(copied).part(range(index, index + 1), set(), comm.device)}
        settings = StageSettings(whole, comm, parallelism, count)
        stage = lay_stages(settings, parts, Parallel())[index]
        seconds: list[tuple[float, float]] = []
        for _ in range(repeats + 1):
            start = _now(comm.device)
            stage.begin_step()
            out = stage.forward(0, loss_fn, batch, position, received)
            made = [out] if isinstance(out, Tensor) else out.tensors
            middle = _now(comm.device)
            stage.backward(0, list(map(torch.ones_like, made)), last=True)
            seconds.append((middle - start, _now(comm.device) - middle))
        received = out if isinstance(out, Handed) else None
        yield statistics.median(f for f, _ in seconds[1:]), statistics.median(b for _, b in seconds[1:])


def _now(device: torch.device) -> float:
    """Reads the clock after the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def agreed_block_costs(
    model: nn.Module, comm: Comm, loss_fn: LossFn, batch: Any, num_samples: int, **settings: Any
) -> Seconds:
    """Measures the costs on rank 0, under the same settings, for every rank.  All ranks call it together."""
    measured = block_costs(model, loss_fn, batch, num_samples, device=comm.device, **settings)
    costs = []
    for _ in blocks_of(model).names:  # block by block, so that each wait has a separate deadline
        seconds = torch.zeros(2, dtype=torch.float64, device=comm.device)
        if comm.rank == 0:
            seconds.copy_(torch.tensor(next(measured), dtype=torch.float64))
        comm.broadcast(seconds, AXES, 0, note=Note("setup")).wait()
        costs.append(seconds.tolist())
    forward, backward = zip(*costs, strict=True)
    return forward, backward
