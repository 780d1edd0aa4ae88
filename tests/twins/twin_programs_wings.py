"""More programs of the twins: collectives alone, sharded tensors, and the verdict on a job."""

from __future__ import annotations

import json
from pathlib import Path

import adapter
import torch
import torch.nn.functional as F
import twin_models as models
from twin_programs import LAYOUTS, PROGRAMS, STAGES, on
from twin_rank import Rank

__all__ = ["PROGRAMS"]


@on([("", mesh) for mesh in ("shard=3", "replica=2 shard=2", "pipe=2 tensor=2")])
def collectives(rank: Rank) -> None:
    comm, axes = rank.comm, tuple(axis for axis in ("shard", "replica", "pipe", "tensor") if axis in rank.cell["mesh"])
    members = comm.mesh.count(axes)
    generator = torch.Generator().manual_seed(comm.rank)
    whole = torch.randn(12 * members, generator=generator)
    with rank.section("collectives"):
        for name, tensor in adapter.collectives(comm, axes, whole, members).items():
            rank.keep(name, {"": tensor})


@on([("", mesh) for mesh in ("tensor=3", "replica=2 tensor=2")])
def sharded_tensors(rank: Rank) -> None:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 7), (3, 7), (5,), (4, 5))]
    w, x, b, v = (tensor.requires_grad_() for tensor in draw)
    with rank.section("cut"):
        w, b = adapter.sharded(w, "out/tensor in", rank.comm), adapter.sharded(b, "out/tensor", rank.comm)
        x, v = adapter.sharded(x, "rows in", rank.comm), adapter.sharded(v, "out in/tensor", rank.comm)
    with rank.section("forward"):
        hidden = F.gelu(F.linear(x, w, b))
        y = F.linear(hidden, v).redistribute("rows out")
        loss = y.square().sum()
    with rank.section("backward"):
        loss.backward()
    with rank.section("moves"):
        for layout in ("rows/tensor out", "rows out/tensor", "rows out"):
            y = y.redistribute(layout)
            rank.keep(f"piece {layout}", {"": y.local})
    with rank.section("whole"):
        for name, tensor in {"y": y, "w": w.grad, "v": v.grad, "b": b.grad}.items():
            rank.keep(name, {"": tensor.full()})


@on([*LAYOUTS, *STAGES])
def the_verdict_on_a_job(rank: Rank) -> None:
    """One rank judges the layout, in a world of its own."""
    if rank.comm.rank:
        return
    for kind in (models.mlp, models.reader)[: 1 if "pipe" in rank.cell["mesh"] else 2]:
        settings = {"microbatches": 2, "steps": 2, "clip": 0.3}
        rank.note(
            kind.__name__,
            adapter.verdict(
                lambda kind=kind: models.filled(kind(0.2)),
                models.loss_sum,
                models.count,
                lambda step: models.batches({}, 3)[step % 3],
                rank.cell["mesh"],
                rank.cell["row"],
                **settings,
            ),
        )


@on(LAYOUTS)
def a_checkpoint_on_disk(rank: Rank) -> None:
    """The files of a checkpoint: names, and the tensors that each has."""
    model = rank.model()
    engine = rank.engine(model, rank.optimizer("adamw"))
    rank.step(engine, rank.batches(1)[0], 1)
    adapter.save(rank.folder, engine, extra={"a": 1})
    if rank.comm.rank == 0:
        files = sorted(file for file in Path(rank.folder).rglob("*") if file.is_file())
        rank.note("files", [str(file.relative_to(rank.folder)) for file in files])
        for file in files:
            if file.suffix == ".safetensors":
                size = int.from_bytes(file.read_bytes()[:8], "little")
                header = json.loads(file.read_bytes()[8 : 8 + size])
                header.pop("__metadata__", None)
                rank.note(file.name, {name: [one["dtype"], one["shape"]] for name, one in header.items()})
