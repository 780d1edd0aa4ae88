"""The steps of ``layout.py`` on local tensors, forward and backward.

    forward   value    before --step--> after
    backward  gradient dual(before) <--dual step-- dual(after)        all_gather <-> reduce_scatter, ...

Pieces of unequal length are padded (``comm/padded.py``).
"""

from typing import Any, cast

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.padded import exchange, start_gather, start_scatter
from plait.sharded.layout import FREE, Step, StepSizes, path, sizes
from plait.sharded.spec import Spec
from plait.table.collectives import Note

NOTE = Note("redistribute")
"""The ledger's name for a redistribution; in the backward the phase is ``redistribute backward``."""


def moved(local: Tensor, start: Spec, end: Spec, note: Note) -> Tensor:
    """Returns a rank's piece under ``end``, given its piece under ``start``; differentiable."""
    steps = path(start.layout, end.layout, start.comm.mesh)
    return cast(Tensor, _Moved.apply(local, steps, tuple(start.shape), start.comm, note)) if steps else local


class _Moved(torch.autograd.Function):
    """Takes the steps in order, each with its collective.  The given tensor stays as it is."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, steps: tuple[Step, ...], shape: tuple[int, ...], comm: Comm, note: Note
    ) -> Tensor:
        ctx.steps, ctx.shape, ctx.comm, ctx.note = steps, shape, comm, note
        for step in steps:
            local = _taken(local, step, sizes(step, shape, comm.mesh, comm.rank), comm, note)
        return local.contiguous().data  # autograd would refuse to write into a view made here

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        steps = tuple(step.dual(ctx.comm.mesh) for step in reversed(ctx.steps))
        note = Note(f"{ctx.note.phase} backward".strip(), ctx.note.unit, ctx.note.microbatch)
        return cast(Tensor, _Moved.apply(gradient, steps, ctx.shape, ctx.comm, note)), None, None, None, None


def _taken(local: Tensor, step: Step, size: StepSizes, comm: Comm, note: Note) -> Tensor:
    """Takes one step; an array without elements is not sent."""
    index, axes = comm.mesh.index(comm.rank, step.axes), step.axes
    if step.kind not in FREE and not size.whole:
        return local.new_zeros(size.after)
    match step.kind:
        case "all_gather":
            return start_gather(comm, local, step.source, size.lengths, axes, note)()
        case "reduce_scatter":
            return start_scatter(comm, local, step.target, size.lengths, axes, note)().contiguous()
        case "all_to_all":
            source, target = (step.source, size.lengths), (step.target, size.lengths_to)
            return exchange(comm, local, source, target, axes, note)
        case "all_reduce":
            out = local.clone(memory_format=torch.contiguous_format)
            comm.all_reduce(out, axes, note=note).wait()
            return out
        case "keep_first":
            return local.clone() if index == 0 else torch.zeros_like(local)
    first = sum(size.lengths[:index])
    if step.kind == "slice":
        return local.narrow(step.target, first, size.lengths[index]).clone(memory_format=torch.contiguous_format)
    assert step.kind == "place"
    out = local.new_zeros(size.after)
    out.narrow(step.source, first, size.lengths[index]).copy_(local)
    return out
