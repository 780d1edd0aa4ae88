"""Causal attention over a context axis without the whole keys: blocks of keys and values go round, one hop a turn.

    turn        0        1        2            rank 0 of context=3: its own block, then rank 2's, then rank 1's
    keys of     0   ►    2   ►    1
    after each  out, lse = merged(out, lse, this block's)               online softmax

Half of the pairs are left out, because the keys are later than the queries: a rank meets only the early block of keys
from an earlier rank, and only its late queries meet keys from a later rank.

The backward goes round again: the gradients of a block's keys and values travel with it, and come home at the end.

Sources: Ring Attention (Liu et al. 2023), FlashAttention (Dao et al. 2022) for the softmax and its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.comm.operation import Work
from plait.table.collectives import Note
from plait.table.tensor_plan import CONTEXT_BACKWARD, CONTEXT_FORWARD
from plait.tensor.no_double_backward import no_double_backward

if TYPE_CHECKING:
    from plait.tensor.time_axis import TimeAxis


class RingAttention(torch.autograd.Function):
    """query_BHTK, key_BGTK, value_BGTK of this rank's steps -> out_BHTK; ``scale`` multiplies the scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: TimeAxis, scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        q, groups = query.to(wide) * scale, query.size(1) // key.size(1)
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:-1], float("-inf"))
        block = torch.stack((key, value))
        for turn in range(axis.ways):
            coming = _pass_on(axis, block, CONTEXT_FORWARD) if turn < axis.ways - 1 else None
            queries, keys = _meeting(axis, turn, q.size(-2))
            scores, v = _scores(q[:, :, queries], block[:, :, :, keys], turn, groups)
            before = lse[:, :, queries]
            both = torch.logaddexp(before, scores.logsumexp(-1))
            merged = out[:, :, queries] * (before - both).exp()[..., None] + (scores - both[..., None]).exp() @ v
            out[:, :, queries], lse[:, :, queries] = merged, both
            block = block if coming is None else _arrived(*coming)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.axis, ctx.scale = axis, scale
        return out

    @staticmethod
    @no_double_backward("attention in a ring", "train such a model without a context axis")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        axis: TimeAxis = ctx.axis
        wide = lse.dtype
        q, groups = query.to(wide) * ctx.scale, query.size(1) // key.size(1)
        given = gradient.to(wide)
        delta = (given * out.to(wide)).sum(-1, keepdim=True)
        block = torch.stack((key, value))
        gradients, dq = torch.zeros_like(block, dtype=wide), torch.zeros_like(q)
        for turn in range(axis.ways):
            coming = _pass_on(axis, block, CONTEXT_BACKWARD) if turn < axis.ways - 1 else None
            queries, keys = _meeting(axis, turn, q.size(-2))
            here, mine, of_out = block[:, :, :, keys], q[:, :, queries], given[:, :, queries]
            scores, v = _scores(mine, here, turn, groups)
            weights = (scores - lse[:, :, queries, None]).exp()
            inner = weights * (of_out @ v.mT - delta[:, :, queries])
            dq[:, :, queries] += inner @ _whole_heads(here[0], groups, wide)
            gradients[0, :, :, keys] += _by_group(inner.mT @ mine, groups)
            gradients[1, :, :, keys] += _by_group(weights.mT @ of_out, groups)
            gradients = _arrived(*_pass_on(axis, gradients, CONTEXT_BACKWARD))
            block = block if coming is None else _arrived(*coming)
        dk, dv = gradients.to(key.dtype)
        return (dq * ctx.scale).to(query.dtype), dk, dv, None, None


def _meeting(axis: TimeAxis, turn: int, length: int) -> tuple[slice, slice]:
    """The slices of this rank's queries and of a turn's keys that meet; in the first turn not all pairs do."""
    owner, half = (axis.index - turn) % axis.ways, length // 2
    if turn == 0:
        return slice(length), slice(length)
    return (slice(length), slice(half)) if owner < axis.index else (slice(half, length), slice(length))


def _scores(q: Tensor, block: Tensor, turn: int, groups: int) -> tuple[Tensor, Tensor]:
    """The scores of queries and a block of keys, -inf for later keys; and the block's values."""
    key, value = (_whole_heads(part, groups, q.dtype) for part in block)
    scores = q @ key.mT
    if turn == 0:  # a rank's steps are in time order
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores, value


def _whole_heads(part_BGTK: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Repeats keys or values for every query head."""
    return part_BGTK.to(dtype).repeat_interleave(groups, 1)


def _by_group(part_BHTK: Tensor, groups: int) -> Tensor:
    """Sums over the query heads that share a key head."""
    whole: Tensor = part_BHTK.unflatten(1, (-1, groups)).sum(2)
    return whole


def _pass_on(axis: TimeAxis, block: Tensor, phase: str) -> tuple[Work, Work, Tensor]:
    """Sends a block to the next rank, and receives one from the rank before."""
    ranks = axis.comm.mesh.group(axis.comm.rank, ("context",))
    block, arriving = block.contiguous(), torch.empty_like(block)
    sent = axis.comm.send(block, ranks[(axis.index + 1) % axis.ways], Note(phase))
    return sent, axis.comm.recv(arriving, ranks[axis.index - 1], Note(phase)), arriving


def _arrived(sent: Work, received: Work, block: Tensor) -> Tensor:
    received.wait()
    sent.wait()
    return block
