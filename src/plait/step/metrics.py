"""Numbers of all data ranks together: counts that a program keeps in addition to the loss.

    rank 0   {"right": 7, "seen": 10}  ─┐
    rank 1   {"right": 5, "seen":  8}  ─┴─► {"right": 12, "seen": 18}, on every rank

Ranks of one data rank have the same samples and count once; under a context axis each counts its own steps of time.
Under a pipeline only ranks with the last stage have outputs; values of the other ranks are ignored, and those ranks
receive the result.

Without a pipeline both can be differentiated, for a loss over the features of all ranks.  The gradient is the sum of
the data ranks' gradients, or this rank's rows of it, so all ranks run that backward.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Comm
from plait.comm.padded import padded
from plait.comm.texts import gather_texts
from plait.table.agreement import DATA_ORDER
from plait.table.collectives import Note

NOTE = Note("metrics")
_NUMBERS = {bool: torch.int64, int: torch.int64, float: torch.float64}


class _Joined(torch.autograd.Function):
    """A result of all data ranks as a function of this rank's values."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, result: Tensor, comm: Comm, rows: slice | None) -> Tensor:
        ctx.comm, ctx.rows, ctx.shape = comm, rows, mine.shape
        return result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        if total.numel():
            ctx.comm.all_reduce(total.view(-1), DATA_ORDER, note=NOTE).wait()
        return total[ctx.rows or ...].reshape(ctx.shape), None, None, None


def sum_over_ranks(comm: Comm, last: int, value: Any) -> Any:
    """The sum over the data axes of a number, a tensor, or each entry of a dict of these; see ``Engine.sum``."""
    given = dict(value) if isinstance(value, Mapping) else {"": value}
    mine = {key: _for_sums(key, one) for key, one in given.items()} if _has_outputs(comm, last) else {}
    kinds = {key: isinstance(given[key], Tensor) for key in mine}
    told = _told(comm, last, {key: [*_signature(comm, t), kinds[key]] for key, t in mine.items()})
    if len({json.dumps(row) for row in told}) > 1:
        raise ValueError(
            f"the ranks sum different things ({', '.join(map(str, told))}): bring the same names, dtypes, shapes and "
            f"need of a gradient on all of them"
        )
    totals: dict[str, Any] = {}
    for key, (dtype, shape, differentiated, is_tensor) in told[0].items():
        total = torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device)
        if _has_outputs(comm, last):
            total.copy_(mine[key].detach())
            comm.all_reduce(total.view(-1), DATA_ORDER, note=NOTE).wait()
        _tell(comm, last, total)
        if differentiated:
            total = cast(Any, _Joined).apply(mine[key], total, comm, None)
        totals[key] = total if is_tensor else total.item()
    return totals.get("", totals)


def gathered_rows(comm: Comm, last: int, value: Tensor | None) -> Tensor:
    """Every data rank's rows, in the order of data ranks; see ``Engine.gather``."""
    mine = None if value is None else value.to(comm.device)
    if mine is not None and not mine.dim():
        raise ValueError("engine.gather of one number: it puts tensors end to end; give a tensor with a dim of samples")
    told = _told(comm, last, None if mine is None else _signature(comm, mine))
    if None in told or len({(dtype, needs, *shape[1:]) for dtype, shape, needs in told}) > 1:
        raise ValueError(
            f"the ranks bring {', '.join(map(str, told))}: give tensors of one dtype, one need of a gradient "
            f"and, after the first dim, one shape"
        )
    (dtype, (_, *rest), differentiated), lengths = told[0], [shape[0] for _, shape, _ in told]
    whole = torch.empty((sum(lengths), *rest), dtype=getattr(torch, dtype), device=comm.device)
    if _has_outputs(comm, last) and len(whole):
        assert mine is not None
        piece = padded(mine.detach(), 0, max(lengths)).contiguous()
        pieces = piece.new_empty((len(lengths), *piece.shape))
        comm.all_gather(pieces, piece, DATA_ORDER, note=NOTE).wait()
        whole = torch.cat([rows[:length] for rows, length in zip(pieces, lengths, strict=True)])
    _tell(comm, last, whole)
    place = comm.mesh.index(comm.rank, ("replica", "shard"))
    start, stop = sum(lengths[:place]), sum(lengths[: place + 1])
    return cast(Any, _Joined).apply(mine, whole, comm, slice(start, stop)) if differentiated else whole


def _signature(comm: Comm, value: Tensor) -> list[Any]:
    needs = value.requires_grad and torch.is_grad_enabled() and comm.mesh.pipe == 1
    return [str(value.dtype)[6:], list(value.shape), needs]


def _has_outputs(comm: Comm, last: int) -> bool:
    return comm.mesh.coordinates(comm.rank)["pipe"] == last


def _told(comm: Comm, last: int, mine: Any) -> list[Any]:
    """The values of the ranks with outputs, by data rank; the first tensor rank's count for all."""
    mesh, rows = comm.mesh, gather_texts(comm, json.dumps(mine), NOTE)
    speakers = [rank for rank in range(mesh.size) if mesh.coordinates(rank)["pipe"] == last]
    return [json.loads(rows[rank]) for rank in speakers if mesh.coordinates(rank)["tensor"] == 0]


def _tell(comm: Comm, last: int, values: Tensor) -> None:
    """Sends the first tensor rank's result to the others, and the last stage's to all stages."""
    if values.numel():
        if _has_outputs(comm, last):
            comm.broadcast(values.view(-1), ("tensor",), 0, note=NOTE).wait()
        comm.broadcast(values.view(-1), ("pipe",), last, note=NOTE).wait()


def _for_sums(key: str, value: Any) -> Tensor:
    """A value as a tensor wide enough for a sum."""
    if type(value) in _NUMBERS:
        return torch.tensor(value, dtype=_NUMBERS[type(value)])
    if not isinstance(value, Tensor):
        raise ValueError(f"engine.sum of {key or 'a value'} of type {type(value).__name__}: give numbers and tensors")
    wide = torch.float32 if value.is_floating_point() or value.is_complex() else torch.int64
    return value.to(torch.promote_types(value.dtype, wide))
