"""Rules of indexing: some of the places of a dim, and tensors joined along one.

A dim is taken apart, or tensors are joined along it, where it is whole on each rank: a part of a cut dim lies on some
ranks only.  The other dims keep their cuts.

    [4, 6/tensor] [1]             -> [6/tensor]
    [4, 6/tensor].split(2, dim=1)    refused: dim 1 is cut
"""

from typing import Any

from plait.sharded.rules import Axes, align, on_meta, on_slices, rule, unsummed, whole
from plait.sharded.spec import OpPlan, Refusal, Spec


def _taken(x: Spec, dim: int, length: int | None) -> Spec:
    """Some places of a whole dim; without a length one place, and the dim is gone."""
    if not x.shape:
        raise Refusal("it has no dims")
    whole(x, [dim], "a part of a dim can be taken where it is whole")
    d, here = dim % len(x.shape), [] if length is None else [length]
    dims = (*x.dims[:d], *[()] * len(here), *x.dims[d + 1 :])
    return x.new((*x.shape[:d], *here, *x.shape[d + 1 :]), dims, x.pending)


@rule("narrow")
def narrow(func: Any, x: Spec, dim: int, start: int, length: int) -> Spec:
    """A span of a whole dim."""
    return _taken(x, dim, length)


@rule("select")
def select(func: Any, x: Spec, dim: int, index: int) -> Spec:
    """One place of a whole dim."""
    return _taken(x, dim, None)


@rule("index_select")
def index_select(func: Any, x: Spec, dim: int, index: Spec) -> Spec:
    """Places of a whole dim; the index is the same on every rank."""
    whole(index, range(len(index.dims)), "the index must be whole")
    unsummed(index)
    return _taken(x, dim, index.shape.numel())


@rule("gather")
def gather(func: Any, x: Spec, dim: int, index: Spec) -> Spec | OpPlan:
    """Places along a whole dim; the other dims of x and index are equal and cut alike."""
    unsummed(index)
    if not x.shape:
        raise Refusal("it has no dims")
    d = dim % len(x.shape)
    for s in (x, index):
        whole(s, [d], "places of a dim can be gathered where it is whole")
    names = [[f"{e}.{k}" if e == d else str(e) for e in range(len(x.shape))] for k in range(2)]
    cuts, after = align([(x, names[0]), (index, names[1])])
    out = x.new(index.shape, [cuts.get(str(e), ()) for e in range(len(x.shape))], x.pending)
    return OpPlan(out, on_slices(func, [x, index], after))


@rule("__getitem__")
def getitem(func: Any, x: Spec, index: Any) -> Spec:
    """Numbers, slices, None and ``...``, along whole dims; a full slice keeps a cut."""
    items = list(index) if type(index) is tuple and index[:1] != ("slice",) else [index]
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
def unbind(func: Any, x: Spec, dim: int = 0) -> OpPlan:
    """The places of a whole dim, one by one."""
    return OpPlan((_taken(x, dim, None),) * x.shape[dim])


@rule("split chunk tensor_split split_with_sizes")
def split(func: Any, x: Spec, sizes: Any = None, dim: int = 0, *, chunks: Any = None) -> OpPlan:
    """Parts of a whole dim, as long as the function makes them of the whole tensor."""
    sizes, n = chunks if sizes is None else sizes, x.shape[dim]
    places = sizes if func.__name__ == "tensor_split" and isinstance(sizes, tuple) else ()
    if list(places) != sorted(k for k in places if 0 <= k <= n):
        raise Refusal(f"its rule knows places from 0 to {n} in ascending order")
    parts = on_meta(func, x, sizes, dim)
    return OpPlan(tuple(_taken(x, dim, part.shape[dim]) for part in parts))


@rule("cat concat concatenate stack")
def join(func: Any, tensors: tuple[Spec, ...], dim: int = 0) -> OpPlan:
    """One after another along a dim that is whole in all, or beside each other along a new dim."""
    shape, pending = on_meta(func, tensors, dim).shape, tensors[0].pending
    d, new = dim % len(shape), len(shape) > len(tensors[0].shape)
    for x in tensors if not new else ():
        whole(x, [d], "tensors are joined along a dim that is whole")
    if any(x.pending != pending for x in tensors):
        unsummed(*tensors, why="only some of the tensors have this sum pending")
    places = [e for e in range(len(shape)) if not new or e != d]
    letters = [[f"{e}.{k}" if e == d else str(e) for e in places[: len(x.shape)]] for k, x in enumerate(tensors)]
    cuts, after = align(list(zip(tensors, letters, strict=True)))
    out = tensors[0].new(shape, [cuts.get(str(e), ()) for e in range(len(shape))], pending)
    if list(tensors) == after:
        return OpPlan(out)
    slices = on_slices(lambda *pieces: pieces, tensors, after)
    return OpPlan(out, lambda tensors, dim=0: func(slices(*tensors), dim))
