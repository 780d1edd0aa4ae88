"""Rules of views: the same elements under another shape.

A reshape keeps a cut where the new shape has a dim with as many elements outside it, whose pieces are the same runs of
elements:

    [4, 6/tensor]   -> [4, 2/tensor, 3]      splitting a cut dim: the cut goes to the outer part
    [4/tensor, 6]   -> [24/tensor]           merging behind a cut dim
    [4, 6/tensor]   -> [24]                  refused: a rank's elements do not lie together
    [5/tensor, 6]   -> [30]  on 2 ranks      refused: 3 rows are 18 elements, half of 30 is 15
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.sharded.rules import Axes, dims_of_result, on_meta, rearranged, rule, whole
from plait.sharded.spec import OpPlan, Refusal, Spec
from plait.table.layout import nested_part


def reshaped(x: Spec, shape: Sequence[int]) -> Spec:
    """The spec after a reshape, if no element has to change its rank."""
    cuts: list[Axes] = [()] * len(shape)
    refused: dict[int, str] = {}
    for d, axes in enumerate(x.dims):
        if not axes:
            continue
        n, inner = x.shape[d], math.prod(x.shape[d + 1 :])
        same_place = (d, d + len(shape) - len(x.shape))  # counted from either end: it comes first
        candidates = [e for e in range(len(shape)) if math.prod(shape[:e]) == math.prod(x.shape[:d]) and not cuts[e]]
        for e in sorted(candidates, key=lambda e: e not in same_place):
            if _same_pieces(x, axes, n, inner, shape[e], math.prod(shape[e + 1 :])):
                cuts[e] = axes
                break
        else:
            pieces = f"the pieces of dim {d} ({n} over {'/'.join(axes)}) are no pieces of {list(shape)}"
            refused[d] = pieces if candidates else "a dim is merged into the one before it, so it must be whole"
    whole(x, refused, next(iter(refused.values()), ""))
    return x.new(shape, cuts, x.pending)


def _same_pieces(x: Spec, axes: Axes, n: int, inner: int, m: int, inner_m: int) -> bool:
    """Whether the axes cut [n, inner] and [m, inner_m] in the same runs of elements, on every rank."""
    ways = tuple(map(x.comm.mesh.axis, axes))
    for index in product(*map(range, ways)):
        (a, b), (c, d) = nested_part(n, ways, index), nested_part(m, ways, index)
        if (b - a) * inner != (d - c) * inner_m or (b > a and a * inner != c * inner_m):
            return False
    return True


def _to(out: Spec, method: Any = Tensor.reshape) -> OpPlan:
    local = tuple(out.local_shape)
    return OpPlan(out, lambda x, *args, **options: method(x, local))


@rule("view reshape view_as reshape_as flatten ravel unflatten")
def reshape(func: Any, x: Spec, *args: Any, **options: Any) -> OpPlan:
    """To global sizes, however they are said."""
    if any(isinstance(a, torch.dtype) for a in (*args, *options.values())):
        raise Refusal("its rule knows sizes, not a view of the bytes as another dtype")
    out = reshaped(x, on_meta(func, x, *args, **options).shape)
    return _to(out, Tensor.view if func is Tensor.view else Tensor.reshape)


@rule("squeeze")
def squeeze(func: Any, x: Spec, dim: Any = None) -> OpPlan:
    """Without dims of global size 1."""
    dims = range(len(x.shape)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    asked = [d % len(x.shape) for d in dims] if x.shape else []
    gone = [d for d in asked if x.shape[d] == 1]
    whole(x, gone, "a dim that is squeezed must be whole")
    kept = [d for d in range(len(x.shape)) if d not in gone]
    return _to(x.new([x.shape[d] for d in kept], [x.dims[d] for d in kept], x.pending))


@rule("expand broadcast_to expand_as repeat")
def expand(func: Any, x: Spec, *args: Any, **options: Any) -> OpPlan:
    """Dims of size 1 to any size, whole dims several times, and new dims in front."""
    shape = on_meta(func, x, *args, **options).shape
    first = len(shape) - len(x.shape)
    whole(x, [d for d, n in enumerate(x.shape) if shape[d + first] != n], "a dim that is expanded must be whole")
    out = x.new(shape, [()] * first + list(x.dims), x.pending)
    return OpPlan(out) if func.__name__ == "repeat" else _to(out, Tensor.expand)


@rule(
    "permute transpose swapaxes swapdims t adjoint movedim moveaxis unsqueeze",
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
)
def other_order(func: Any, x: Spec, *args: Any, **options: Any) -> Spec:
    """Dims in another order, and new ones of size 1."""
    return rearranged(x, dims_of_result(func, x, *args, **options), x.pending)
