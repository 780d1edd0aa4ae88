"""The steps of ``core/layout.py`` on local tensors, and their way back.

    forward   value    before --step--> after
    backward  gradient dual(before) <--dual step-- dual(after)        all_gather <-> reduce_scatter, ...

A collective wants one contiguous array of equal pieces, first dim outermost, so a step along another dim moves
that dim to the front, and uneven pieces are padded with zeros to the largest one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from plait.comm import Comm
from plait.core.collectives import Note
from plait.core.layout import Sizes, Step, path, region, sizes
from plait.tensor.spec import Spec

NOTE = Note("redistribute")
"""How the ledger calls a redistribution; on the way back the phase is ``redistribute backward``."""


def moved(local: Tensor, start: Spec, end: Spec, note: Note) -> Tensor:
    """A rank's piece under ``end``, given its piece under ``start``; differentiable."""
    steps = path(start.layout, end.layout, start.comm.mesh)
    if not steps:
        return local
    if local.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _Moved.apply(local, steps, tuple(start.shape), start.comm, note))
    return take(local, steps, tuple(start.shape), start.comm, note)


def take(local: Tensor, steps: tuple[Step, ...], shape: tuple[int, ...], comm: Comm, note: Note) -> Tensor:
    """The steps in order, each with its collective.  The given tensor stays as it is."""
    with torch.no_grad():
        for step in steps:
            local = STEPS[step.kind](local, step, sizes(step, shape, comm.mesh, comm.rank), shape, comm, note)
    return local


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, steps: tuple[Step, ...], shape: tuple[int, ...], comm: Comm, note: Note
    ) -> Tensor:
        ctx.steps, ctx.shape, ctx.comm, ctx.note = steps, shape, comm, note
        return take(local, steps, shape, comm, note)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        steps = tuple(step.dual(ctx.comm.mesh) for step in reversed(ctx.steps))
        note = Note(f"{ctx.note.phase} backward".strip(), ctx.note.unit, ctx.note.microbatch)
        return cast(Tensor, _Moved.apply(gradient, steps, ctx.shape, ctx.comm, note)), None, None, None, None


# ---- one function per kind of step -------------------------------------------------------------


def _front(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0)


def _padded(tensor: Tensor, spans: tuple[tuple[int, int], ...], largest: int) -> Tensor:
    """The spans of dim 0, each padded to the largest: [len(spans) * largest, ...], contiguous and not the input."""
    if all(b - a == largest for a, b in spans):
        return tensor.clone(memory_format=torch.contiguous_format)
    out = tensor.new_zeros(len(spans) * largest, *tensor.shape[1:])
    for k, (a, b) in enumerate(spans):
        out[k * largest : k * largest + b - a] = tensor[a:b]
    return out


def _unpadded(tensor: Tensor, spans: tuple[tuple[int, int], ...], largest: int) -> Tensor:
    if all(b - a == largest for a, b in spans):
        return tensor
    return torch.cat([tensor[k * largest : k * largest + b - a] for k, (a, b) in enumerate(spans)])


def _mine(step: Step, comm: Comm) -> int:
    return comm.mesh.index(comm.rank, step.axes)


def _all_gather(local: Tensor, step: Step, size: Sizes, shape: tuple[int, ...], comm: Comm, note: Note) -> Tensor:
    front = _front(local, step.source)
    n, rest = len(size.pieces), front.shape[1:]
    out = front.new_zeros(n * size.largest, *rest)
    if size.whole:
        piece = front.contiguous()
        if len(piece) != size.largest:
            piece = _padded(piece, ((0, len(piece)),), size.largest)
        comm.all_gather(out, piece, step.axes, note).wait()
    return _unpadded(out, size.pieces, size.largest).movedim(0, step.source).contiguous()


def _reduce_scatter(local: Tensor, step: Step, size: Sizes, shape: tuple[int, ...], comm: Comm, note: Note) -> Tensor:
    whole = _padded(_front(local, step.target), size.pieces, size.largest)
    out = whole.new_zeros(size.largest, *whole.shape[1:])
    if size.whole:
        comm.reduce_scatter(out, whole, step.axes, note=note).wait()
    low, high = size.pieces[_mine(step, comm)]
    return out[: high - low].movedim(0, step.target).contiguous()


def _all_reduce(local: Tensor, step: Step, size: Sizes, shape: tuple[int, ...], comm: Comm, note: Note) -> Tensor:
    out = local.clone(memory_format=torch.contiguous_format)
    if size.whole:
        comm.all_reduce(out, step.axes, note=note).wait()
    return out


def _all_to_all(local: Tensor, step: Step, size: Sizes, shape: tuple[int, ...], comm: Comm, note: Note) -> Tensor:
    # Message k: my span of the source dim (padded) x span k of the target dim (padded).
    n = len(size.pieces)
    front = local.movedim((step.target, step.source), (0, 1))
    whole = _padded(front, size.pieces_to, size.largest_to).unflatten(0, (n, size.largest_to))
    if whole.size(2) != size.largest:
        wide = whole.new_zeros(n, size.largest_to, size.largest, *whole.shape[3:])
        wide[:, :, : whole.size(2)] = whole
        whole = wide
    out = torch.zeros_like(whole)
    if size.whole:
        comm.all_to_all(out, whole.contiguous(), step.axes, note).wait()
    low, high = size.pieces_to[_mine(step, comm)]
    rows = out[:, : high - low].transpose(1, 2).flatten(0, 1)  # [n * largest of the source dim, mine of the target's]
    return _unpadded(rows, size.pieces, size.largest).movedim((0, 1), (step.source, step.target)).contiguous()


def _slice(local: Tensor, step: Step, size: Sizes, shape: tuple[int, ...], comm: Comm, note: Note) -> Tensor:
    low, high = size.pieces[_mine(step, comm)]
    return local.narrow(step.target, low, high - low).clone(memory_format=torch.contiguous_format)


def _place(local: Tensor, step: Step, size: Sizes, shape: tuple[int, ...], comm: Comm, note: Note) -> Tensor:
    out = local.new_zeros(region(step.after, shape, comm.mesh, comm.rank).shape)
    low, high = size.pieces[_mine(step, comm)]
    out.narrow(step.source, low, high - low).copy_(local)
    return out


def _keep_first(local: Tensor, step: Step, size: Sizes, shape: tuple[int, ...], comm: Comm, note: Note) -> Tensor:
    return local.clone() if _mine(step, comm) == 0 else torch.zeros_like(local)


STEPS: dict[str, Callable[..., Tensor]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "place": _place,
    "keep_first": _keep_first,
}
