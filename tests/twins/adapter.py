"""Every name of plait that the twins use, in one place: mend this file when a name moves.

A frozen plait and the one of this tree both run the twins.  Where a call changes, try the new one first, then the old
one, as in ``getattr(comm, "new", None) or comm.old``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import plait


def find(name: str, *places: str) -> Any:
    """The first of these modules that has the name; an empty place is the package itself."""
    for place in places:
        try:
            return getattr(import_module(".".join(filter(None, ["plait", place]))), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"plait has no {name} in {', '.join(places)}: give its new place to tests/twins/adapter.py")


def Engine(model: nn.Module, comm: Any, *, check_drift: int = 0, **settings: Any) -> Any:  # noqa: N802
    """An engine that looks for drift every so many steps."""
    try:
        drift = find("DriftCheck", "referee.sanitize.drift")
    except ImportError:
        return plait.Engine(model, comm, check_drift=check_drift, **settings)
    before = comm.engine_watchers
    comm.engine_watchers += (lambda engine: drift(engine, check_drift),)
    try:
        return plait.Engine(model, comm, **settings)
    finally:
        comm.engine_watchers = before


TABLE: Any = plait.TABLE
cross_entropy_sum: Any = plait.cross_entropy_sum


class Chain(nn.Module):
    """A model that a pipeline may cut: ``first``, each of ``blocks``, ``last``, run in turn."""

    first: nn.Module
    blocks: nn.ModuleList
    last: nn.Module

    def pipeline_blocks(self) -> list[str]:
        return ["first", "blocks", "last"]

    def pipeline_links(self) -> list[str]:
        return ["first", *(f"blocks.{number}" for number in range(len(self.blocks))), "last"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def on_threads(mesh: str, body: Callable[[Any], Any], deadline: float) -> list[Any]:
    """The body's results on one thread for each rank."""
    return plait.run_threads(mesh, body, deadline=deadline)


def on_shared_memory(mesh: str, deadline: float) -> Any:
    """This process's rank; the environment says which."""
    return plait.join(mesh, shared_memory=True, deadline=deadline)


def row_of(name: str, dtype: str, offload: bool) -> Any:
    """A row by name or text, with the dtypes of a mixed precision, its optimizer on the CPU."""
    if name not in TABLE and ":" not in name:
        return name  # it is refused
    row = TABLE[name] if name in TABLE else plait.parse_strategy(name)
    row = row.mixed(dtype.removesuffix("-mixed")) if dtype.endswith("-mixed") else row
    return row.offloaded() if offload else row


def loss_scale(scale: float) -> Any:
    return plait.LossScale(scale)


def mark_of(comm: Any) -> int:
    """A mark in the rank's ledger; ``lines_since`` takes it."""
    return len(comm.ledger)


def lines_since(comm: Any, mark: int) -> list[list[Any]]:
    """The ledger's lines: kind, axes, bytes of the whole array, bytes sent, phase, unit, microbatch."""
    entries = comm.ledger.since(mark)
    return [[e.kind, "/".join(e.axes), e.bytes, e.sent, e.note.phase, e.note.unit, e.note.microbatch] for e in entries]


def data_place(comm: Any) -> tuple[int, int]:
    """This rank's part of the batch, and how many parts there are."""
    return comm.mesh.data_rank(comm.rank), comm.mesh.data_size


def pieces_of(engine: Any) -> dict[str, Tensor]:
    """Copies of this rank's parameters and optimizer state, by name, key and region."""
    found: dict[str, Tensor] = {}
    for piece in getattr(engine, "placed", engine).pieces():
        region = ",".join(f"{start}:{stop}" for start, stop in piece.region)
        first = "" if piece.first else " (copy)"
        found[f"piece {piece.name} {piece.key or 'value'} [{region}]{first}"] = piece.tensor.detach().cpu().clone()
    return found


def held_of(engine: Any) -> dict[str, int]:
    """Bytes held between steps."""
    held = getattr(engine, "placed", engine).bytes_held()
    return {name: held[name] for name in ("params", "grads", "optimizer")}


def whole_state_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in engine.full_state_dict().items()}


def numbers_of_optimizer(engine: Any) -> dict[str, Any]:
    """The optimizer's groups, and its state that is no tensor of a parameter's shape."""
    state = engine.optimizer_state_dict(elements=False)
    numbers: dict[str, Any] = {}
    for name, own in state["state"].items():
        for key, value in own.items():
            if not isinstance(value, Tensor) or (value.device.type != "meta" and value.numel() == 1):
                numbers[f"{name} {key}"] = float(value)
    for number, group in enumerate(state["param_groups"]):
        numbers |= {f"group {number} {key}": repr(value) for key, value in sorted(group.items())}
    return numbers


def result_of(step: Any) -> dict[str, Any]:
    """The numbers that a step gives back."""
    norm = None if step.grad_norm is None else float(step.grad_norm)
    fields = {"loss": float(step.loss), "norm": norm, "count": step.count, "made": step.made}
    return fields | {"local losses": [float(loss) for loss in step.local_losses]}


def clip(engine: Any, limit: float) -> float:
    """The norm before clipping, in a program's own loop; the sums are finished."""
    if hasattr(engine, "reduce"):
        return float(engine.reduce(clip=limit).grad_norm)
    return float(engine.clip_grad_norm_(limit))


def last_result_of(engine: Any) -> dict[str, Any]:
    return result_of(engine.last)


def settings_of(cell: dict[str, Any]) -> dict[str, Any]:
    """The keywords of ``Engine`` that lay a model out."""
    names = ("schedule", "chunks", "hold", "split", "recompute", "cut", "bucket", "prefetch", "sequence_parallel")
    return {name: tuple(cell[name]) if name == "split" else cell[name] for name in names if name in cell}


def average_of(engine: Any, decay: float) -> Any:
    return plait.EMA(engine, decay)


def save(folder: str, engine: Any, extra: Any) -> None:
    plait.save(folder, engine, extra=extra)


def load(folder: str, engine: Any) -> list[Any]:
    """The step and the extra values of a checkpoint, after the engine has taken it over."""
    loaded = plait.load(folder, engine)
    return [loaded.step, loaded.extra]


def collectives(comm: Any, axes: tuple[str, ...], whole: Tensor, members: int) -> dict[str, Tensor]:
    """The results of each collective over the axes, on tensors of this rank."""
    piece = whole[: len(whole) // members].clone()
    found = {name: whole.clone() for name in ("all_reduce", "broadcast", "reduce", "all_to_all", "all_gather")}
    found |= {"reduce_scatter": piece.clone(), "scatter": piece.clone(), "max": whole.clone()}
    comm.all_reduce(found["all_reduce"], axes).wait()
    comm.all_reduce(found["max"], axes, op="max").wait()
    comm.broadcast(found["broadcast"], axes, 1).wait()
    comm.reduce(found["reduce"], axes, 0).wait()
    comm.all_to_all(found["all_to_all"], whole, axes).wait()
    comm.all_gather(found["all_gather"], piece, axes).wait()
    comm.reduce_scatter(found["reduce_scatter"], whole, axes).wait()
    root = comm.mesh.index(comm.rank, axes) == 0
    comm.scatter(found["scatter"], whole if root else None, axes, 0).wait()
    comm.barrier(axes)
    return found


def unlike_collectives(comm: Any) -> None:
    """A broadcast on the last rank, an all-reduce on the others."""
    tensor = torch.zeros(6)
    if comm.rank == comm.mesh.size - 1:
        comm.broadcast(tensor, ("shard",), 0).wait()
    else:
        comm.all_reduce(tensor, ("shard",)).wait()


def collective_over(comm: Any, axis: str) -> None:
    comm.all_reduce(torch.zeros(6), (axis,)).wait()


def sharded(tensor: Tensor, layout: str, comm: Any) -> Any:
    return plait.ShardedTensor.from_full(tensor, layout, comm)


def verdict(build: Any, loss: Any, count: Any, batches: Any, mesh: str, row: str, **settings: Any) -> dict[str, Any]:
    """The words of a verdict on a layout of a job."""
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)  # noqa: E731
    job = plait.UserJob(build=build, loss_fn=loss, count_fn=count, batches=batches, optimizer=optimizer)
    found = plait.verify(job, mesh=mesh, strategy=row, **settings)
    return {"equal": found.equal, "bitwise": found.bitwise}
