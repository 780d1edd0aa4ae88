"""Rules of parts: some of the places of a dim, and tensors joined along one.

A dim is taken apart, or tensors are joined along it, where it is whole on each rank: a part of a cut dim lies on some
ranks only.  The other dims keep their cuts.

    [4, 6/tensor] [1]             -> [6/tensor]
    [4, 6/tensor].split(2, dim=1)    refused: dim 1 is cut
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from plait.tensor.rules import Axes, align, cut_of, on_slices, rule, sliced, unsummed, whole
from plait.tensor.spec import Plan, Refusal, Spec


def _narrowed(x: Spec, dim: int, length: int) -> Spec:
    d = dim % len(x.shape)
    return x.new([length if e == d else n for e, n in enumerate(x.shape)], x.dims, x.pending)


@rule("narrow")
def narrow(func: Any, x: Spec, dim: int, start: int, length: int) -> Spec:
    """A span of a whole dim."""
    whole(x, [dim], "a part of a dim can be taken where it is whole")
    return _narrowed(x, dim, length)


@rule("select")
def select(func: Any, x: Spec, dim: int, index: int) -> Spec:
    """One place of a whole dim."""
    whole(x, [dim], "a part of a dim can be taken where it is whole")
    d = dim % len(x.shape)
    return x.new((*x.shape[:d], *x.shape[d + 1 :]), (*x.dims[:d], *x.dims[d + 1 :]), x.pending)


@rule("index_select")
def index_select(func: Any, x: Spec, dim: int, index: Spec) -> Spec:
    """Places of a whole dim; the index is the same on every rank."""
    whole(x, [dim], "a part of a dim can be taken where it is whole")
    whole(index, range(len(index.dims)), "the index must be whole")
    unsummed(index)
    return _narrowed(x, dim, index.shape.numel())


@rule("gather")
def gather(func: Any, x: Spec, dim: int, index: Spec) -> Spec | Plan:
    """Places along a whole dim; the other dims of x and index are equal and cut alike."""
    unsummed(index)
    d = dim % len(x.shape)
    for s in (x, index):
        whole(s, [d], "places of a dim can be gathered where it is whole")
    names = [[f"{e}.{k}" if e == d else str(e) for e in range(len(x.shape))] for k in range(2)]
    cuts, after = align([(x, names[0]), (index, names[1])])
    out = x.new(index.shape, [cuts.get(str(e), ()) for e in range(len(x.shape))], x.pending)
    return Plan(out, on_slices(func, [x, index], after))


@rule("__getitem__")
def getitem(func: Any, x: Spec, index: Any) -> Spec:
    """Numbers, slices, None and ``...``, along whole dims; a full slice keeps a cut."""
    items = list(index) if isinstance(index, tuple) and index[:1] != ("slice",) else [index]
    taken = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in [i for i in items if not isinstance(i, Spec)]:
        items.append(Ellipsis)
    at = next(k for k, i in enumerate(items) if i is Ellipsis)
    items[at : at + 1] = [("slice", None, None, None)] * (len(x.shape) - taken)
    shape: list[int] = []
    dims: list[Axes] = []
    d = 0
    for item in items:
        if item is None:
            shape.append(1)
            dims.append(())
            continue
        if type(item) is int:
            whole(x, [d], "a part of a dim can be taken where it is whole")
        elif isinstance(item, tuple) and item[:1] == ("slice",):
            if not all(type(v) in (int, type(None)) for v in item[1:]):
                raise Refusal("its rule knows slices of numbers only")
            span = range(x.shape[d])[slice(*item[1:])]
            if len(span) != x.shape[d]:
                whole(x, [d], "a part of a dim can be taken where it is whole")
            shape.append(len(span))
            dims.append(x.dims[d])
        else:
            raise Refusal(
                "its rule knows numbers, slices, None and ... as indices", hint="torch.index_select takes lists."
            )
        d += 1
    return x.new(shape, dims, x.pending)


@rule("unbind")
def unbind(func: Any, x: Spec, dim: int = 0) -> Plan:
    """The places of a whole dim, one by one."""
    return Plan((select(func, x, dim, 0),) * x.shape[dim])


@rule("split chunk tensor_split split_with_sizes")
def split(func: Any, x: Spec, sizes: Any = None, dim: int = 0, *, chunks: Any = None) -> Plan:
    """Parts of a whole dim."""
    name = func.__name__
    sizes = chunks if sizes is None else sizes
    whole(x, [dim], "a dim can be split where it is whole")
    n = x.shape[dim]
    if name == "tensor_split":
        if isinstance(sizes, tuple) and list(sizes) != sorted(k for k in sizes if 0 <= k <= n):
            raise Refusal(f"its rule knows places from 0 to {n} in ascending order")
        ends = [*sizes, n] if isinstance(sizes, tuple) else []
        parts = [b - a for a, b in zip([0, *ends], ends, strict=False)]
        parts = parts or [n // sizes + (k < n % sizes) for k in range(sizes)]
    elif isinstance(sizes, tuple):
        parts = list(sizes)
    else:
        step = sizes if name == "split" else max(1, -(-n // sizes))
        parts = [min(step, n - k) for k in range(0, n, step)] or [0] * (1 if name == "split" else sizes)
    return Plan(tuple(_narrowed(x, dim, k) for k in parts))


@rule("cat concat concatenate")
def cat(func: Any, tensors: tuple[Spec, ...], dim: int = 0) -> Spec | Plan:
    """One after another along a dim that is whole in all."""
    for x in tensors:
        whole(x, [dim], "tensors are joined along a dim that is whole")
    return _joined(func, tensors, dim % len(tensors[0].shape), new=False)


@rule("stack")
def stack(func: Any, tensors: tuple[Spec, ...], dim: int = 0) -> Spec | Plan:
    """Beside each other along a new dim."""
    return _joined(func, tensors, dim % (len(tensors[0].shape) + 1), new=True)


def _joined(func: Any, tensors: tuple[Spec, ...], dim: int, new: bool) -> Spec | Plan:
    pending = tensors[0].pending
    if any(x.pending != pending for x in tensors):
        unsummed(*tensors, why="only some of the tensors have this sum pending")
    letters = [
        [f"{d}.{k}" if d == dim and not new else str(d) for d in range(len(x.shape))] for k, x in enumerate(tensors)
    ]
    cuts, after = align(list(zip(tensors, letters, strict=True)))
    dims = [cuts.get(str(d), ()) for d in range(len(tensors[0].shape))]
    shape = list(tensors[0].shape)
    if new:
        dims.insert(dim, ())
        shape.insert(dim, len(tensors))
    else:
        shape[dim] = sum(x.shape[dim] for x in tensors)
    out = tensors[0].new(shape, dims, pending)
    if all(a is b for a, b in zip(tensors, after, strict=True)):
        return out
    parts = [cut_of(b, a) for b, a in zip(tensors, after, strict=True)]

    def run(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        joined: Tensor = func([sliced(t, c) for t, c in zip(tensors, parts, strict=True)], dim)
        return joined

    return Plan(out, run)
