"""What each link of a model costs, measured; so that stages can be balanced by it.

Each link is made a stage of its own, one after the other in this process: its forward on what the link before left,
and its backward.  So no more than one link's parameters exist at a time, and whatever else a stage does (rotary tables,
masks, hooks) is in its cost.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Comm, ThreadWorld
from plait.core.cells import find_strategy
from plait.core.collectives import Note
from plait.core.mesh import AXES, Mesh
from plait.core.split import balanced
from plait.engine.build import Whole
from plait.engine.links import StageModel, chain_of
from plait.engine.rng import Draw
from plait.engine.stage import LossFn, Place, Stage
from plait.tensor.parallel import Parallel


def link_costs(model: nn.Module, loss_fn: LossFn, batch: Any, num_samples: int, repeats: int = 5) -> tuple[float, ...]:
    """Seconds of forward and backward of each link on one microbatch: medians, the first round left out.

    Args:
        model: its parameters may be on meta; it is left as it is.
        batch: a microbatch as the run will bring it, of ``num_samples`` samples.
    """
    chain = chain_of(model)
    comm = ThreadWorld(Mesh()).comm(0)
    whole = Whole(model, {id(p): n for n, p in model.named_parameters()})
    draw = Draw(0, 0, 0, num_samples)
    received: Tensor | None = None
    costs = []
    for index in range(len(chain.names)):
        stage = Stage(
            StageModel.part(model, chain, range(index, index + 1)),
            whole,
            Place(index, len(chain.names), chain.feed),
            comm,
            find_strategy("ddp"),
            parallel=Parallel(),
            units=None,
            cut="element",
            seed=0,
            prefetch=1,
            sequence=False,
            split_backward=False,
            before_root=lambda args, kwargs: None,
        )
        seconds = []
        for _ in range(repeats + 1):
            given = None if received is None else received.detach()
            start = time.perf_counter()
            stage.begin_step()
            out = stage.forward(0, loss_fn, batch, draw, given)
            stage.backward(0, torch.ones_like(out), last=True)
            seconds.append(time.perf_counter() - start)
        costs.append(statistics.median(seconds[1:]))
        received = out.detach()
    return tuple(costs)


def measured_split(
    model: nn.Module, comm: Comm, loss_fn: LossFn, batch: Any, num_samples: int, num_stages: int
) -> tuple[int, ...]:
    """How many links each stage should have, by what they cost on rank 0; the same on all ranks, who call it together.

    Raises:
        ValueError: more stages than links.
    """
    sizes = torch.zeros(num_stages, dtype=torch.int64, device=comm.device)
    if comm.rank == 0:
        sizes += torch.tensor(balanced(link_costs(model, loss_fn, batch, num_samples), num_stages), device=comm.device)
    comm.broadcast(sizes, AXES, 0, note=Note("setup")).wait()
    return tuple(sizes.tolist())
