"""Shared by the tests of sharded tensors: meshes, random layouts, distinct values, a table of operators."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from plait.comm import Comm
from plait.sharded import ShardedTensor
from plait.sharded.layout import Layout
from plait.table.mesh import Mesh

MESHES = ["tensor=3", "tensor=4", "replica=2 tensor=2", "shard=3 tensor=2", "tensor=1", "replica=2"]

Shapes = tuple[tuple[int, ...], ...]


def values(shape: tuple[int, ...], seed: int = 0, requires_grad: bool = True) -> Tensor:
    """Distinct values around 0 in fp64, the same in each call."""
    n = math.prod(shape)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + n))
    x = (order.double() - n / 2 + 0.3) / max(1, n) * 3 + seed * 0.01
    return x.reshape(shape).requires_grad_(requires_grad)


def numbers(shape: tuple[int, ...], below: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def layouts(draw: Any, mesh: Mesh, num_dims: int, pending: bool = True) -> Layout:
    """Any layout of a tensor with so many dims."""
    axes = [a for a in ("replica", "shard", "tensor") if mesh.axis(a) > 1]
    dims: list[list[str]] = [[] for _ in range(num_dims)]
    due = []
    for axis in draw(st.permutations(axes)):
        place = draw(st.integers(-2 if pending else -1, num_dims - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            due.append(axis)
    return Layout(tuple(map(tuple, dims)), tuple(due))


def table(**rows: tuple[Shapes, Callable[..., Any]]) -> dict[str, tuple[Shapes, Callable[..., Any]]]:
    return rows


TARGETS = numbers((5, 3), 4)
TARGETS[1, 2] = -100
MASK = numbers((5, 6), 2) > 0
TOKENS = numbers((3, 4), 5)

CUBE = ((2, 4, 3),)

OPERATORS = table(
    where_zero=(((5, 6),), lambda a: torch.where(MASK, a, 0.0)),
    masked_fill_low=(((5, 6),), lambda a: a.masked_fill(MASK, float("-inf")).exp()),
    cast=(((5, 6),), lambda a: a.float().to(torch.float64)),
    einsum=(((2, 5, 3), (3, 4, 5)), lambda a, b: torch.einsum("bik,kji->bj", a, b)),
    embedding_padding=(((5, 3),), lambda w: F.embedding(TOKENS, w, padding_idx=2)),
    cross_entropy_mean=(((5, 4, 3),), lambda a: F.cross_entropy(a, TARGETS)),
    attention_learned_mask=(
        ((3, 1, 5, 2), (3, 1, 6, 2), (3, 1, 6, 4), (1, 1, 6)),
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    ),
    attention_grouped=(
        ((2, 6, 5, 2), (2, 3, 5, 2), (2, 3, 5, 2)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    ),
    view_ones=(((1, 5, 1, 4),), lambda a: a.reshape(1, 20)),
    view_zero=(((0, 6),), lambda a: a.reshape(6, 0)),
    view_scalar=(((1, 1),), lambda a: a.reshape(())),
    index=(((5, 6, 2),), lambda a: a[:, 1, None]),
    new_zeros=(((5, 2),), lambda a: a.sum(0) + a.new_zeros(2)),
    iterate=(((3, 5),), lambda a: a.unbind()[0] + next(iter(a))),
    rotary=(((2, 4, 5, 6),), lambda a: torch.cat((-a[..., 3:], a[..., :3]), -1) * values((5, 6), 4, False) + a),
    shared_heads=(((2, 4, 5, 2),), lambda a: a[:, :, None].expand(2, 4, 3, 5, 2).reshape(2, 12, 5, 2).tanh()),
    rms_by_hand=(((5, 6), (6,)), lambda a, w: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-5) * w),
    head=(((2, 4, 6), (12, 6)), lambda x, w: F.linear(x, w).unflatten(-1, (3, 2, 2)).transpose(1, 3).tanh()),
    mlp=(((3, 5), (7, 5), (4, 7)), lambda x, a, b: F.linear(F.linear(x, a).relu(), b)),
    # other ways to say it
    unbind=(CUBE, lambda a: a.unbind(dim=1)[3] + a.unbind(1)[3]),
    flip=(CUBE, lambda a: a.flip(dims=(0, 1)) + a.flip(-2) * 2 + a.flip(0, 1)),
    tensor_split=(CUBE, lambda a: (a.tensor_split((1, 2), -1)[2], a.tensor_split((1, -1), 0)[2])),
    std=(CUBE, lambda a: torch.std(input=a, dim=-1)),
    copy_at_once=(CUBE, lambda a: a.clone().copy_(a, True)),
    add_other=(CUBE, lambda a: torch.add(a, other=a)),
    nothing=(CUBE, lambda a: a[False]),
    as_integers=(CUBE, lambda a: a.view(torch.int64)),
    by_lists=(CUBE, lambda a: (a[[0]], a[:, [2, 0, 2]])),
)
"""Operators and short programs beside those of torch's own database (``op_database``)."""


def shard(full: Tensor, layout: Layout | str, comm: Comm) -> ShardedTensor:
    """As ``from_full``, but a pending sum is made of shares that differ on every rank."""
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    layout = layout.on(comm.mesh)
    whole = ShardedTensor.from_full(full.detach(), layout, comm)
    local = whole.local
    here = comm.mesh.coordinates(comm.rank)
    for axis in layout.pending:
        n = comm.mesh.axis(axis)
        local = local + (n - 1) / 2 - here[axis]  # these add up to zero
    return ShardedTensor(local, layout, comm, tuple(full.shape)).detach().requires_grad_(full.requires_grad)
