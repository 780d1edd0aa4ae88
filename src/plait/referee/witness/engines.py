"""Other libraries' engines on plait's jobs: an adapter is a screenful that makes the engine and its step function.

    def adapter(job, model, comm):                   on every rank; the model is whole, and the same everywhere
        ...
        return wrapped, optimizer, step              step(batches, count, clip): the rank's microbatches, the terms of
                                                     the whole step's loss, the global norm to clip to (None: none)

``plait verify --engine NAME`` runs one under a witness.  ``--engine FILE.py:NAME`` runs your own, or one for another
library in examples/engines.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from plait.comm import Comm
from plait.run.job.job import Job
from plait.step import Engine
from plait.table.mesh import AXES, Mesh
from plait.zero.wrap import automatic

Step: TypeAlias = Callable[[Sequence[Any], int, float | None], object]


class Driven(NamedTuple):
    """An engine on a rank: its model and optimizer, which are witnessed, and its step."""

    model: nn.Module | Engine
    optimizer: Optimizer
    step: Step | None = None
    told: Mapping[str, Any] = {}
    """Further arguments of ``plait.witness``."""
    train: Callable[[Sequence[Sequence[Any]], float | None], object] | None = None
    """Replaces ``step`` if an engine has its own loop: takes the microbatches of each step, and the norm to clip to."""


Adapter: TypeAlias = Callable[[Job, nn.Module, Comm], Driven | tuple[nn.Module, Optimizer, Step]]


def loop(job: Job, model: nn.Module, optimizer: Optimizer, ranks: int, hold: Callable[[], Any] = nullcontext) -> Step:
    """The step of an engine that takes the mean of the ranks' gradients, at the last backward.

    Args:
        hold: a context in which a backward sends nothing.
    """

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            with hold() if number < len(batches) - 1 else nullcontext():
                (job.loss_fn(model, batch) * ranks / count).backward()
        if clip is not None:
            clip_by_norm(model, clip)
        optimizer.step()

    return step


def clip_by_norm(model: nn.Module, clip: float) -> None:
    """Clips as torch does, but takes a mixture of DTensors and plain gradients."""
    gradients: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [(g.full_tensor() if hasattr(g, "full_tensor") else g).norm() for g in gradients]
    factor = (clip / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0).item()
    for gradient in gradients:
        gradient.mul_(factor)


def ddp(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """torch's DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped, optimizer = DistributedDataParallel(model), job.optimizer(model.parameters())
    return Driven(wrapped, optimizer, loop(job, wrapped, optimizer, comm.mesh.size, wrapped.no_sync))


def fsdp2(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """torch's fully_shard on every block and on the rest; hybrid with a replica axis."""
    from torch.distributed.device_mesh import init_device_mesh

    axes = [axis for axis in ("replica", "shard") if comm.mesh.axis(axis) > 1] or ["shard"]
    device_mesh = init_device_mesh("cpu", tuple(comm.mesh.axis(axis) for axis in axes), mesh_dim_names=tuple(axes))
    if axes == ["replica"]:
        device_mesh = init_device_mesh("cpu", (comm.mesh.size, 1), mesh_dim_names=("replica", "shard"))
    shard(model, device_mesh)
    optimizer = job.optimizer(model.parameters())
    return Driven(model, optimizer, loop(job, model, optimizer, comm.mesh.data_size, lambda: held(model)))


def plait_engine(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """plait's own engine under the same witness: zero3, or hsdp with a replica axis."""
    row = "zero3" if comm.mesh.replica == 1 else "hsdp"
    functions = {"loss_fn": job.loss_fn, "count_fn": job.count_fn}
    engine = Engine(model, comm, strategy=row, optimizer=job.optimizer(model.parameters()), **functions)  # type: ignore[arg-type]

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        engine.clip = clip
        engine.step(batches)

    assert engine.optimizer is not None
    return Driven(engine, engine.optimizer, step)


ENGINES: dict[str, Adapter] = {"plait": plait_engine, "ddp": ddp, "fsdp2": fsdp2}
"""Adapters by name; a new one is a row."""


def check_engine(name: str, mesh: Mesh) -> None:
    """Refuses an engine that does not exist, or lacks an axis of the mesh; ValueError with the fix."""
    if name.rpartition(":")[1]:
        return
    if name not in ENGINES:
        raise ValueError(
            f"unknown engine {name!r}: choose one of {', '.join(ENGINES)}, or write FILE.py:NAME, as in "
            f"examples/engines.py:accelerate, where those of other libraries are"
        )
    if strange := [axis for axis in AXES if mesh.axis(axis) > 1 and axis not in ("replica", "shard")]:
        raise ValueError(f"engine {name} has no {strange[0]} axis: give --mesh with replica and shard alone")


@cache
def find_adapter(name: str) -> Adapter:
    """The adapter of a name, or of ``FILE.py:NAME``; ValueError if there is none."""
    from plait.run.job.user_code import load_name

    if not name.rpartition(":")[1]:
        return ENGINES[name]
    found = load_name(name, "engine", FunctionType)
    if not callable(found):
        raise ValueError(f"engine {name!r} is {type(found).__name__}: give a function (job, model, comm)")
    adapter: Adapter = found
    return adapter


def shard(model: nn.Module, device_mesh: Any) -> None:
    """Calls fully_shard on every block and on the rest."""
    from torch.distributed.fsdp import fully_shard

    for name in list(dict.fromkeys(automatic(model)))[:0:-1]:
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList | nn.Sequential):
            fully_shard(model.get_submodule(name), mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)


@contextmanager
def held(model: Any) -> Iterator[None]:
    """Makes a backward of FSDP2 send nothing."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)
