"""What the tests of sharded tensors share: meshes, random layouts, distinct values, and a table of operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from plait.comm import Comm
from plait.sharded import ShardedTensor
from plait.table.layout import Layout
from plait.table.mesh import Mesh

MESHES = ["tensor=3", "tensor=4", "replica=2 tensor=2", "shard=3 tensor=2", "tensor=1", "replica=2"]

Shapes = tuple[tuple[int, ...], ...]


def values(shape: tuple[int, ...], seed: int = 0, requires_grad: bool = True) -> Tensor:
    """Distinct values around 0 in fp64, the same for whoever asks."""
    n = math.prod(shape)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + n))
    x = (order.double() - n / 2 + 0.3) / max(1, n) * 3 + seed * 0.01
    return x.reshape(shape).requires_grad_(requires_grad)


def numbers(shape: tuple[int, ...], below: int, seed: int = 0) -> Tensor:
    """Indices."""
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

OPERATORS = table(
    add=(((5, 6), (5, 6)), torch.add),
    add_broadcast=(((3, 1, 6), (5, 1)), lambda a, b: a + b),
    add_scalar_tensor=(((5, 6), ()), lambda a, b: a + b),
    add_number=(((5, 6),), lambda a: a + 2.5),
    sub=(((4, 6), (6,)), lambda a, b: a - b),
    subtract_from=(((5, 3),), lambda a: 1 - a),
    mul=(((5, 6), (5, 6)), lambda a, b: a * b),
    mul_row=(((5, 6), (6,)), lambda a, b: a * b),
    mul_number=(((0, 6),), lambda a: a * 3),
    square=(((5, 2),), lambda a: a * a),
    div=(((5, 6), (5, 1)), lambda a, b: a / b),
    div_number=(((5,),), lambda a: a / 3),
    into=(((5,),), lambda a: 3 / a),
    neg=(((),), lambda a: -a),
    relu=(((5, 6),), F.relu),
    gelu=(((5, 6),), F.gelu),
    tanh=(((7,),), torch.tanh),
    sigmoid=(((),), torch.sigmoid),
    silu=(((5, 0),), F.silu),
    exp=(((1, 3),), Tensor.exp),
    power=(((5, 3),), lambda a: a**2),
    clamp=(((5, 3),), lambda a: a.clamp(min=-0.5, max=0.7)),
    maximum=(((5, 3), (5, 3)), torch.maximum),
    where=(((5, 6), (5, 6)), lambda a, b: torch.where(MASK, a, b)),
    where_zero=(((5, 6),), lambda a: torch.where(MASK, a, 0.0)),
    masked_fill=(((5, 6),), lambda a: a.masked_fill(MASK, 0.0)),
    masked_fill_low=(((5, 6),), lambda a: a.masked_fill(MASK, float("-inf")).exp()),
    cast=(((5, 6),), lambda a: a.float().to(torch.float64)),
    lerp=(((5, 3), (5, 3)), lambda a, b: torch.lerp(a, b, 0.3)),
    matmul=(((5, 6), (6, 4)), torch.matmul),
    mm=(((5, 3), (3, 7)), torch.mm),
    matmul_vector=(((5, 6), (6,)), torch.matmul),
    vector_matmul=(((6,), (6, 4)), lambda a, b: a @ b),
    dot=(((6,), (6,)), torch.matmul),
    matmul_batch=(((2, 5, 6), (2, 6, 3)), torch.matmul),
    matmul_broadcast=(((2, 1, 5, 6), (3, 6, 3)), torch.matmul),
    matmul_shared=(((4, 5, 6), (6, 3)), torch.matmul),
    bmm=(((3, 2, 5), (3, 5, 4)), torch.bmm),
    linear=(((5, 6), (7, 6)), F.linear),
    linear_bias=(((2, 3, 6), (5, 6), (5,)), F.linear),
    addmm=(((4,), (5, 6), (6, 4)), torch.addmm),
    einsum=(((2, 5, 3), (3, 4, 5)), lambda a, b: torch.einsum("bik,kji->bj", a, b)),
    einsum_outer=(((5,), (4,)), lambda a, b: torch.einsum("i,j->ij", a, b)),
    sum=(((5, 6),), torch.sum),
    sum_dim=(((5, 6, 2),), lambda a: a.sum(1)),
    sum_keepdim=(((5, 6),), lambda a: a.sum((0, 1), keepdim=True)),
    mean=(((5, 6),), torch.mean),
    mean_dim=(((5, 6),), lambda a: a.mean(0)),
    mean_last=(((2, 5),), lambda a: a.mean(dim=-1, keepdim=True)),
    amax=(((5, 6),), lambda a: a.amax(1)),
    max_dim=(((5, 6),), lambda a: a.max(dim=0).values),
    max_all=(((5, 6),), torch.max),
    min_dim=(((5, 6),), lambda a: a.min(1)[0]),
    var=(((5, 6),), lambda a: a.var(1, correction=0)),
    std_keepdim=(((5, 6),), lambda a: a.std(-1, keepdim=True)),
    logsumexp=(((5, 6),), lambda a: a.logsumexp(1)),
    softmax=(((5, 6),), lambda a: F.softmax(a, dim=-1)),
    softmax_method=(((5, 6),), lambda a: a.softmax(0)),
    log_softmax=(((2, 5, 3),), lambda a: F.log_softmax(a, 1)),
    cumsum=(((5, 3),), lambda a: a.cumsum(0)),
    layer_norm=(((5, 6), (6,), (6,)), lambda a, w, b: F.layer_norm(a, (6,), w, b)),
    layer_norm_plain=(((5, 2, 3),), lambda a: F.layer_norm(a, (2, 3))),
    rms_norm=(((5, 6), (6,)), lambda a, w: F.rms_norm(a, (6,), w)),
    embedding=(((5, 3),), lambda w: F.embedding(TOKENS, w)),
    embedding_padding=(((5, 3),), lambda w: F.embedding(TOKENS, w, padding_idx=2)),
    cross_entropy=(((5, 4, 3),), lambda a: F.cross_entropy(a, TARGETS, reduction="sum")),
    cross_entropy_mean=(((5, 4, 3),), lambda a: F.cross_entropy(a, TARGETS)),
    cross_entropy_none=(((5, 4, 3),), lambda a: F.cross_entropy(a, TARGETS, reduction="none")),
    cross_entropy_smooth=(((5, 4, 3),), lambda a: F.cross_entropy(a, TARGETS, label_smoothing=0.1)),
    cross_entropy_weight=(
        ((5, 4, 3),),
        lambda a: F.cross_entropy(a, TARGETS, torch.tensor([1.0, 2, 3, 4]).double()),
    ),
    nll_loss=(((5, 4, 3),), lambda a: F.nll_loss(a, TARGETS)),
    mse_loss=(((5, 6), (5, 6)), F.mse_loss),
    mse_sum=(((5, 6), (5, 6)), lambda a, b: F.mse_loss(a, b, reduction="sum")),
    attention=(((4, 3, 5, 2),) * 3, F.scaled_dot_product_attention),
    attention_causal=(
        ((2, 4, 5, 2),) * 3,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    attention_mask=(
        ((3, 2, 5, 2), (3, 2, 6, 2), (3, 2, 6, 4)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK.double()),
    ),
    attention_learned_mask=(
        ((3, 1, 5, 2), (3, 1, 6, 2), (3, 1, 6, 4), (1, 1, 6)),
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    ),
    attention_grouped=(
        ((2, 6, 5, 2), (2, 3, 5, 2), (2, 3, 5, 2)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    ),
    view_merge=(((4, 6, 3),), lambda a: a.view(24, 3)),
    view_split=(((2, 6),), lambda a: a.view(2, 3, 2)),
    view_same=(((5, 6),), lambda a: a.view(5, 1, 6, 1)),
    view_ones=(((1, 5, 1, 4),), lambda a: a.reshape(1, 20)),
    view_zero=(((0, 6),), lambda a: a.reshape(6, 0)),
    view_scalar=(((1, 1),), lambda a: a.reshape(())),
    flatten=(((4, 2, 3),), lambda a: a.flatten(0, 1)),
    flatten_all=(((5, 6),), lambda a: a.flatten()),
    unflatten=(((5, 12),), lambda a: a.unflatten(-1, (4, 3))),
    reshape=(((4, 6),), lambda a: a.reshape(8, 3)),
    unsqueeze=(((5, 6),), lambda a: a.unsqueeze(1)),
    squeeze=(((5, 1, 6),), lambda a: a.squeeze(1)),
    expand=(((5, 1),), lambda a: a.expand(3, 5, 4)),
    transpose=(((5, 2, 6),), lambda a: a.transpose(0, -1)),
    permute=(((5, 2, 6),), lambda a: a.permute(2, 0, 1)),
    t=(((5, 6),), lambda a: a.T),
    mt=(((2, 5, 6),), lambda a: a.mT),
    movedim=(((5, 2, 6),), lambda a: a.movedim(0, 2)),
    cat=(((5, 2), (5, 3)), lambda a, b: torch.cat([a, b], dim=1)),
    cat_rows=(((2, 5), (3, 5)), lambda a, b: torch.cat((a, b))),
    stack=(((5, 2), (5, 2)), lambda a, b: torch.stack([a, b], 1)),
    split=(((5, 7),), lambda a: a.split(3, dim=1)),
    split_sizes=(((7, 5),), lambda a: a.split([2, 5])),
    chunk=(((5, 6),), lambda a: a.chunk(3, -1)),
    unbind=(((2, 5),), lambda a: a.unbind(0)),
    narrow=(((5, 6),), lambda a: a.narrow(1, 2, 3)),
    select=(((5, 6),), lambda a: a.select(0, 3)),
    slice=(((5, 6),), lambda a: a[1:4]),
    slice_last=(((5, 6, 2),), lambda a: a[..., :1]),
    index=(((5, 6, 2),), lambda a: a[:, 1, None]),
    index_minus=(((5, 6),), lambda a: a[-1]),
    index_select=(((5, 6),), lambda a: a.index_select(1, torch.tensor([0, 3, 3]))),
    dropout_off=(((5, 6),), lambda a: F.dropout(a, 0.5, training=False)),
    clone=(((5, 6),), torch.clone),
    norm=(((5, 6),), lambda a: a.norm(dim=1)),
    var_unbiased=(((5, 6),), lambda a: a.var(0, True)),
    normalize=(((5, 6),), lambda a: F.normalize(a, dim=-1)),
    tril=(((2, 5, 5),), torch.tril),
    repeat=(((5, 2),), lambda a: a.repeat(3, 1, 2)),
    gather=(((5, 6),), lambda a: a.gather(1, numbers((5, 2), 6))),
    outer=(((5,), (4,)), torch.outer),
    new_zeros=(((5, 2),), lambda a: a.sum(0) + a.new_zeros(2)),
    iterate=(((3, 5),), lambda a: a.unbind()[0] + next(iter(a))),
    rotary=(
        ((2, 4, 5, 6),),
        lambda a: torch.cat((-a[..., 3:], a[..., :3]), -1) * values((5, 6), 4, False) + a,
    ),
    shared_heads=(
        ((2, 4, 5, 2),),
        lambda a: a[:, :, None].expand(2, 4, 3, 5, 2).reshape(2, 12, 5, 2).tanh(),
    ),
    rms_by_hand=(
        ((5, 6), (6,)),
        lambda a, w: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
    ),
    head=(((2, 4, 6), (12, 6)), lambda x, w: F.linear(x, w).unflatten(-1, (3, 2, 2)).transpose(1, 3).tanh()),
    mlp=(
        ((3, 5), (7, 5), (4, 7)),
        lambda x, a, b: F.linear(F.linear(x, a).relu(), b),
    ),
)


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
