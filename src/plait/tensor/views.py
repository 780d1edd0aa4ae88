"""Rules of views: the same elements under another shape.

A reshape falls into groups of dims with equal products; in a group only the outermost dim may be cut, and only so
that the pieces begin where pieces of the new outermost dim begin:

    [4, 6/tensor]   -> [4, 2/tensor, 3]      splitting a cut dim: the cut goes to the outer part
    [4/tensor, 6]   -> [24/tensor]           merging behind a cut dim
    [4, 6/tensor]   -> [24]                  refused: a rank's elements do not lie together
    [5/tensor, 6]   -> [30]  on 2 ranks      refused: 3 rows are 18 elements, half of 30 is 15
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.core.layout import Layout, nested_part
from plait.tensor.rules import Axes, rule, whole
from plait.tensor.spec import Plan, Refusal, Spec


def _numbers(sizes: tuple[Any, ...]) -> list[int]:
    """``x.view(2, 3)`` and ``x.view((2, 3))``."""
    return list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple) else sizes)


def _shape(x: Spec, sizes: list[int]) -> tuple[int, ...]:
    """Sizes without the -1."""
    if -1 in sizes:
        rest = -math.prod(sizes)
        sizes = [x.shape.numel() // rest if n == -1 and rest else n for n in sizes]
    if math.prod(sizes) != x.shape.numel():
        raise Refusal(f"shape {sizes} has another number of elements")
    return tuple(sizes)


def reshaped(x: Spec, shape: Sequence[int]) -> Spec:
    """The spec after a reshape, if no element has to change its rank."""
    old = list(zip(x.shape, x.dims, strict=True))
    cuts: list[Axes] = [()] * len(shape)
    # Equal dims at both ends keep their cuts, also where sizes are 0.
    head = 0
    while head < min(len(old), len(shape)) and old[head][0] == shape[head]:
        cuts[head] = old[head][1]
        head += 1
    tail = 0
    while tail < min(len(old), len(shape)) - head and old[-1 - tail][0] == shape[-1 - tail]:
        cuts[len(shape) - 1 - tail] = old[-1 - tail][1]
        tail += 1
    i, j, end_i, end_j = head, head, len(old) - tail, len(shape) - tail
    while i < end_i or j < end_j:
        first_i, first_j = i, j
        a = b = 1
        while True:
            if a <= b and i < end_i:
                a, i = a * old[i][0], i + 1
            elif j < end_j:
                b, j = b * shape[j], j + 1
            elif i < end_i:
                a, i = a * old[i][0], i + 1
            if (a == b and a > 0 and j > first_j) or (i == end_i and j == end_j):
                break
        while i < end_i and old[i][0] == 1 and not old[i][1]:  # ones belong to the group before them
            i += 1
        _group(x, old[first_i:i], shape, range(first_j, j), cuts, range(first_i, i))
    return x.new(shape, cuts, x.pending)


def _group(
    x: Spec, old: list[tuple[int, Axes]], shape: Sequence[int], new: range, cuts: list[Axes], where: range
) -> None:
    """Hands the cut of a group's outermost dim to the outermost dim of the new group."""
    big = [(n, axes, d) for (n, axes), d in zip(old, where, strict=True) if n != 1 or axes]
    if not any(axes for _, axes, _ in big):
        return
    n, axes, d = big[0]
    if any(a for _, a, _ in big[1:]):
        free = [() if e in where and e != d else a for e, a in enumerate(x.dims)]
        raise Refusal(
            "a dim is merged into the one before it, so it must be whole", [(x, Layout(tuple(free), x.pending))]
        )
    target = next((e for e in new if shape[e] != 1), None)
    inner = math.prod(n for n, _, _ in big[1:])
    fits = target is not None and _same_pieces(
        x, axes, n, inner, shape[target], math.prod(shape[target + 1 : new.stop])
    )
    if not fits:
        free = [() if e == d else a for e, a in enumerate(x.dims)]
        to = shape[new.start : new.stop]
        raise Refusal(
            f"the pieces of dim {d} ({n} over {'/'.join(axes)}) are no pieces of {list(to)}",
            [(x, Layout(tuple(free), x.pending))],
        )
    assert target is not None
    cuts[target] = axes


def _same_pieces(x: Spec, axes: Axes, n: int, inner: int, m: int, inner_m: int) -> bool:
    ways = tuple(map(x.comm.mesh.axis, axes))
    for index in product(*map(range, ways)):
        a, b = nested_part(n, ways, index)
        c, d = nested_part(m, ways, index)
        if (b - a) * inner != (d - c) * inner_m or (b > a and a * inner != c * inner_m):
            return False
    return True


def _to(x: Spec, out: Spec, method: Any = Tensor.reshape) -> Plan:
    local = tuple(out.local_shape)
    return Plan(out, lambda x, *args, **options: method(x, local))


@rule("view reshape")
def view(func: Any, x: Spec, *sizes: Any) -> Plan:
    """To global sizes; -1 once."""
    if any(isinstance(size, torch.dtype) for size in sizes):
        raise Refusal("its rule knows sizes, not a view of the bytes as another dtype")
    out = reshaped(x, _shape(x, _numbers(sizes)))
    return _to(x, out, Tensor.view if func is Tensor.view else Tensor.reshape)


@rule("view_as reshape_as")
def view_as(func: Any, x: Spec, other: Spec) -> Plan:
    """To the shape of another."""
    return _to(x, reshaped(x, other.shape))


@rule("flatten")
def flatten(func: Any, x: Spec, start_dim: int = 0, end_dim: int = -1) -> Plan:
    """Dims ``start_dim`` to ``end_dim`` as one."""
    n = max(1, len(x.shape))
    a, b = start_dim % n, end_dim % n
    return _to(x, reshaped(x, (*x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :])))


@rule("ravel")
def ravel(func: Any, x: Spec) -> Plan:
    """All dims as one."""
    return flatten(func, x)


@rule("unflatten")
def unflatten(func: Any, x: Spec, dim: int, sizes: Any) -> Plan:
    """One dim as several."""
    d, new = dim % len(x.shape), list(sizes)
    if -1 in new:
        new[new.index(-1)] = x.shape[d] // max(1, -math.prod(new))
    return _to(x, reshaped(x, (*x.shape[:d], *new, *x.shape[d + 1 :])))


@rule("unsqueeze")
def unsqueeze(func: Any, x: Spec, dim: int) -> Spec:
    """A new dim of size 1."""
    d = dim % (len(x.shape) + 1)
    return x.new((*x.shape[:d], 1, *x.shape[d:]), (*x.dims[:d], (), *x.dims[d:]), x.pending)


@rule("squeeze")
def squeeze(func: Any, x: Spec, dim: Any = None) -> Plan:
    """Without dims of global size 1."""
    dims = range(len(x.shape)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    asked = [d % len(x.shape) for d in dims] if x.shape else []
    gone = [d for d in asked if x.shape[d] == 1]
    whole(x, gone, "a dim that is squeezed must be whole")
    kept = [d for d in range(len(x.shape)) if d not in gone]
    return _to(x, x.new([x.shape[d] for d in kept], [x.dims[d] for d in kept], x.pending))


@rule("expand broadcast_to")
def expand(func: Any, x: Spec, *sizes: Any, implicit: bool = False) -> Plan:
    """Dims of size 1 to any size, and new dims in front."""
    numbers = _numbers(sizes)
    first = len(numbers) - len(x.shape)
    shape = [x.shape[d - first] if n == -1 else n for d, n in enumerate(numbers)]
    wide = [d for d in range(len(x.shape)) if shape[d + first] != x.shape[d]]
    whole(x, wide, "a dim that is expanded must be whole")
    if any(x.shape[d] != 1 for d in wide):
        raise Refusal(f"sizes {numbers} do not fit")
    return _to(x, x.new(shape, [()] * first + list(x.dims), x.pending), Tensor.expand)


@rule("repeat")
def repeat(func: Any, x: Spec, *sizes: Any) -> Plan:
    """Whole dims several times, and new dims in front."""
    times = _numbers(sizes)
    first = len(times) - len(x.shape)
    whole(x, [d for d in range(len(x.shape)) if times[d + first] != 1], "a dim that is repeated must be whole")
    shape = [n * (x.shape[d - first] if d >= first else 1) for d, n in enumerate(times)]
    return Plan(x.new(shape, [()] * first + list(x.dims), x.pending))


@rule("expand_as")
def expand_as(func: Any, x: Spec, other: Spec) -> Plan:
    """To the shape of another."""
    return expand(func, x, *other.shape)


def _permuted(x: Spec, order: Sequence[int]) -> Spec:
    order = [d % len(x.shape) for d in order] if x.shape else []
    return x.new([x.shape[d] for d in order], [x.dims[d] for d in order], x.pending)


@rule("permute")
def permute(func: Any, x: Spec, *dims: Any) -> Spec:
    """Dims in another order."""
    return _permuted(x, _numbers(dims))


@rule("transpose swapaxes swapdims")
def transpose(func: Any, x: Spec, dim0: int, dim1: int) -> Spec:
    """Two dims exchanged."""
    order = list(range(len(x.shape)))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(x, order)


@rule("t adjoint", *(getattr(Tensor, name).__get__ for name in ("T", "mT")))
def turned(func: Any, x: Spec) -> Spec:
    """``x.T``, ``x.mT``, ``x.t()``: the last two dims exchanged, all reversed for T."""
    order = list(range(len(x.shape)))
    last_two = name_of_property(func) in ("mT", "adjoint")
    return _permuted(x, [*order[:-2], *order[:-3:-1]] if last_two else order[::-1])


def name_of_property(func: Any) -> str:
    """``T`` for the getter of ``Tensor.T``."""
    return str(getattr(getattr(func, "__self__", None), "__name__", "") or func.__name__)


@rule("movedim moveaxis")
def movedim(func: Any, x: Spec, source: Any, destination: Any) -> Spec:
    """Dims moved to other places."""
    n = len(x.shape)
    sources = [d % n for d in (source if isinstance(source, tuple) else (source,))]
    targets = [d % n for d in (destination if isinstance(destination, tuple) else (destination,))]
    order: list[int] = [-1] * n
    for s, t in zip(sources, targets, strict=True):
        order[t] = s
    rest = iter(d for d in range(n) if d not in sources)
    return _permuted(x, [next(rest) if d < 0 else d for d in order])
