"""The contestants that train a model: a plain loop, torch's engines, plait's rows.

A contestant is a ``step()`` that trains its own copy on the model's batch and returns the mean loss.  Everything of
plait is its public face, so the same script measures any version of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness.contestants import comm_beside
from harness.groups import free_port
from models import ROWS, Model, loss_sum, owners
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plait
from plait.table.mesh import Mesh

LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Contestant:
    """One engine with one copy of the model."""

    step: Callable[[], float]
    evaluate: Callable[[], float] | None = None
    """The forward alone, in eval mode and without gradients."""


def world(mesh: str) -> plait.Comm:
    """plait's world; its process group takes the place of the one that the harness made, and serves torch's engines."""
    port = [free_port()]
    dist.broadcast_object_list(port, 0)
    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])
    return plait.join(mesh)


def shared(mesh: str) -> plait.Comm:
    """plait's world over memory that the ranks share, in addition to the other one."""
    return comm_beside(Mesh.parse(mesh), "overhead", shared_memory=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every contestant."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _loop(recipe: Model, model: nn.Module, microbatches: int) -> Contestant:
    optimizer, batch = sgd(model), recipe.batch(microbatches)

    def step() -> float:
        optimizer.zero_grad()
        losses = []
        for x in batch:
            loss = loss_sum(model, x) / (ROWS * microbatches)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        optimizer.step()
        return sum(loss.item() for loss in losses)

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        losses = [loss_sum(model, x) / (ROWS * microbatches) for x in batch]
        model.train()
        return sum(loss.item() for loss in losses)

    return Contestant(step, evaluate)


def plain(recipe: Model, microbatches: int = 1) -> Contestant:
    """One process that never talks."""
    return _loop(recipe, recipe.build(), microbatches)


def torch_ddp(recipe: Model) -> Contestant:
    model = DistributedDataParallel(recipe.build(), gradient_as_bucket_view=True, static_graph=True)
    return _loop(recipe, model, 1)


def torch_fsdp2(recipe: Model) -> Contestant:
    model = recipe.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in owners(model):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return _loop(recipe, model, 1)


def ours(recipe: Model, comm: plait.Comm, strategy: str, microbatches: int = 1, **options: Any) -> Contestant:
    """``engine.step`` and ``engine.evaluate``; every module with parameters is a unit."""
    batch, engine, _ = _engine(recipe, comm, strategy, microbatches, **options)
    return Contestant(lambda: engine.step(batch).loss, lambda: engine.evaluate(batch).loss)


def own_loop(recipe: Model, comm: plait.Comm, strategy: str) -> Contestant:
    """``engine.backward`` and ``optimizer.step``."""
    (x,), engine, optimizer = _engine(recipe, comm, strategy, 1)

    def step() -> float:
        engine.backward(loss_sum(engine.model, x), count=ROWS)
        optimizer.step()
        return engine.last.loss

    return Contestant(step)


def _engine(recipe: Model, comm: plait.Comm, strategy: str, microbatches: int, **options: Any) -> tuple[Any, Any, Any]:
    model = recipe.build()
    optimizer = sgd(model)
    engine = plait.Engine(
        model,
        comm,
        strategy=strategy,
        optimizer=optimizer,
        loss_fn=loss_sum,
        count_fn=len,
        units=owners(model),
        **options,
    )
    return recipe.batch(microbatches), engine, optimizer
