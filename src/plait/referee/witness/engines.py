"""Engines of others on a job of ours: an adapter is a screenful that makes the engine and says what a step is.

    def adapter(job, model, comm):                   on every rank; the model is whole, and the same everywhere
        ...
        return wrapped, optimizer, step              step(batches, count, clip): the rank's microbatches, the terms of
                                                     the whole step's loss, the global norm to clip to (None: none)

``plait verify --engine NAME`` runs one under a witness.  One of your own is ``--engine FILE.py:NAME``, as those
of other libraries in examples/engines.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm import Comm
from plait.pipeline.blocks import blocks_of
from plait.referee.witness.pieces import named
from plait.run.job.job import Job
from plait.schedule.partition import even
from plait.step import Engine
from plait.step.step import num_samples
from plait.table.mesh import AXES, Mesh
from plait.zero.wrap import automatic

Step: TypeAlias = Callable[[Sequence[Any], int, float | None], object]


class Driven(NamedTuple):
    """An engine on a rank: what is witnessed, and its step."""

    model: nn.Module | Engine
    optimizer: Optimizer
    step: Step | None = None
    told: Mapping[str, Any] = {}
    """What ``plait.witness`` has to be told besides."""
    train: Callable[[Sequence[Sequence[Any]], float | None], object] | None = None
    """In the place of a step, where an engine has its own loop: the microbatches of each step, the norm to clip to."""


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
    """As torch's, where some gradients are DTensors and others are not."""
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
    """torch's fully_shard, on every block and on the rest; with a replica axis, hybrid."""
    from torch.distributed.device_mesh import init_device_mesh

    axes = [axis for axis in ("replica", "shard") if comm.mesh.axis(axis) > 1] or ["shard"]
    device_mesh = init_device_mesh("cpu", tuple(comm.mesh.axis(axis) for axis in axes), mesh_dim_names=tuple(axes))
    if axes == ["replica"]:
        device_mesh = init_device_mesh("cpu", (comm.mesh.size, 1), mesh_dim_names=("replica", "shard"))
    shard(model, device_mesh)
    optimizer = job.optimizer(model.parameters())
    return Driven(model, optimizer, loop(job, model, optimizer, comm.mesh.data_size, lambda: held(model)))


def torch_pipelining(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """torch's 1F1B over stages of the model's chain."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    links, rank, ranks = blocks_of(model).names, comm.rank, comm.mesh.size
    split = even(len(links), ranks)
    stages = [nn.Sequential(*(model.get_submodule(links[i]) for i in own)) for own in split]
    stage, mine = stages[rank], [links[i] for i in split[rank]]
    names = {name: ".".join([mine[int(name.split(".")[0])], *name.split(".")[1:]]) for name, _ in named(stage)}
    optimizer = job.optimizer(stage.parameters())

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        optimizer.zero_grad()
        whole = _joined(batches)

        def loss(output: Tensor, rows: Tensor) -> Tensor:
            return job.loss_fn(lambda *_, **__: output, _rows(whole, rows)) / count  # type: ignore[arg-type]

        shapes = [_entering(job, batches[0])]
        with torch.no_grad():
            for other in stages[: rank + 1]:
                shapes.append(other(shapes[-1]))
        for output in shapes[1:]:
            output.requires_grad_()
        parts: Any = PipelineStage(
            stage, rank, ranks, torch.device("cpu"), input_args=shapes[-2], output_args=shapes[-1]
        )
        schedule = Schedule1F1B(parts, len(batches), loss_fn=loss, scale_grads=False)
        rows = torch.arange(num_samples(whole))
        first = (_entering(job, whole),) if rank == 0 else ()
        schedule.step(*first, target=rows if rank == ranks - 1 else None, return_outputs=False)
        optimizer.step()

    return Driven(stage, optimizer, step, {"names": names, "inputs": rank == 0})


def plait_engine(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Ours, under the witness that everybody has: zero3, and hsdp where there is a replica axis."""
    row = "zero3" if comm.mesh.replica == 1 else "hsdp"
    functions = {"loss_fn": job.loss_fn, "count_fn": job.count_fn}
    engine = Engine(model, comm, strategy=row, optimizer=job.optimizer(model.parameters()), **functions)  # type: ignore[arg-type]

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        engine.clip = clip
        engine.step(batches)

    assert engine.optimizer is not None
    return Driven(engine, engine.optimizer, step)


def _stages_alone(model: nn.Module, mesh: Mesh) -> str:
    """Why torch's pipeline cannot train a model on a mesh; empty where it can."""
    shared = len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
    if shared:
        return "its stages would each have a copy of a tied weight, and torch.distributed.pipelining sums no copies"
    links = blocks_of(model).names
    for stage, own in enumerate(even(len(links), mesh.axis("pipe"))):
        if not any(True for i in own for _ in model.get_submodule(links[i]).parameters()):
            return f"stage {stage} would have no parameters, and torch makes no optimizer of none: give a smaller mesh"
    return ""


ENGINES: dict[str, Adapter] = {
    "plait": plait_engine,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "torch-pipelining": torch_pipelining,
}
"""A new one is a row."""


def check_engine(name: str, model: nn.Module, mesh: Mesh, batch: int, microbatches: int, clip: float | None) -> None:
    """Refuses an engine that is not there, or does not fit; ValueError with the fix."""
    if name.rpartition(":")[1]:
        return
    if name not in ENGINES:
        raise ValueError(
            f"unknown engine {name!r}: choose one of {', '.join(ENGINES)}, or write FILE.py:NAME, as in "
            f"examples/engines.py:accelerate, where those of other libraries are"
        )
    axes = ("pipe",) if name == "torch-pipelining" else ("replica", "shard")
    if strange := [axis for axis in AXES if mesh.axis(axis) > 1 and axis not in axes]:
        raise ValueError(f"engine {name} has no {strange[0]} axis: give --mesh with {' and '.join(axes)} alone")
    if name != "torch-pipelining":
        return
    if reason := _stages_alone(model, mesh):
        raise ValueError(f"engine {name}: {reason}")
    if batch % microbatches:
        raise ValueError(
            f"engine {name} cuts a batch of {batch} samples in {microbatches} equal microbatches: give a batch that "
            f"{microbatches} divides"
        )
    if clip is not None:
        raise ValueError(f"engine {name} has no norm of all stages: give --clip None")


@cache
def find_adapter(name: str) -> Adapter:
    """The adapter of a name, or of ``FILE.py:NAME``; ValueError where there is none."""
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
    """A backward of FSDP2 that sends nothing."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _joined(batches: Sequence[Any]) -> Any:
    """Microbatches of one structure as one batch."""
    from plait.torch_private import tree_map

    def join(*leaves: Any) -> Any:
        cut = isinstance(leaves[0], Tensor) and leaves[0].dim() and [len(leaf) for leaf in leaves] == sizes
        return torch.cat(leaves) if cut else leaves[0]

    sizes = [num_samples(batch) for batch in batches]
    return tree_map(join, *batches)


def _rows(whole: Any, rows: Tensor) -> Any:
    from plait.torch_private import tree_map

    num = num_samples(whole)
    return tree_map(lambda x: x[rows] if isinstance(x, Tensor) and x.dim() and len(x) == num else x, whole)


class _Entered(Exception):  # noqa: N818
    """What a loss gives to its model."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _entering(job: Job, batch: Any) -> Tensor:
    def model(value: Tensor) -> Tensor:
        raise _Entered(value)

    try:
        job.loss_fn(model, batch)  # type: ignore[arg-type]
    except _Entered as entered:
        return entered.value
    raise ValueError("the loss gives its model nothing")
