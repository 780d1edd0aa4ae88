"""Rules of products, sums, views and joins.

A sum over a cut dim, and a product over cut dims, leave a sum pending over the axes of the cut:

    matmul     [m k] [k n] -> [m n]        a cut over m or n stays; a cut over k leaves a sum pending
    linear     [.. k] [n k] -> [.. n]      "n/tensor k" computes columns, "n k/tensor" leaves a pending sum

A reshape keeps a cut if the new shape has a dim with as many elements outside it, whose pieces are the same runs of
elements:

    [4, 6/tensor]   -> [4, 2/tensor, 3]      splitting a cut dim: the cut goes to the outer part
    [4/tensor, 6]   -> [24/tensor]           merging into a cut dim
    [4, 6/tensor]   -> [24]                  refused: a rank's elements are not neighbours
    [5/tensor, 6]   -> [30]  on 2 ranks      refused: 3 rows are 18 elements, half of 30 is 15
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.sharded.layout import nested_part
from plait.sharded.rules import (
    Axes,
    Letters,
    align,
    broadcast,
    by_letters,
    contract,
    dims_of_result,
    on_meta,
    on_slices,
    rearranged,
    rule,
    specs_in,
    unsummed,
    whole,
)
from plait.sharded.spec import OpPlan, Refusal, Spec

# ---- products -----------------------------------------------------------------------------------------------


def _product(func: Any, operands: Sequence[tuple[Spec, Letters]], out: Sequence[str]) -> OpPlan:
    result, after = contract(operands, out)
    return OpPlan(result, on_slices(func, [s for s, _ in operands], after))


@rule("matmul mm bmm mv dot __matmul__")
def matmul(func: Any, a: Spec, b: Spec) -> OpPlan:
    """Multiplies vectors, matrices and batches of them, with broadcasting."""
    if not a.shape or not b.shape:
        raise Refusal("a product of matrices needs at least one dim on each side")
    left, right = ["m", "k"][-len(a.shape) :], ["k", "n"][: len(b.shape)]
    batch, (outer_a, outer_b) = broadcast([a, b], [len(left), len(right)])
    out = [*map(str, range(len(batch))), *left[:-1], *right[1:]]
    return _product(func, [(a, [*outer_a, *left]), (b, [*outer_b, *right])], out)


@rule("linear")
def linear(func: Any, input: Spec, weight: Spec, bias: Spec | None = None) -> Spec | OpPlan:
    """``input @ weight.T + bias``; the product must not be pending where the bias is added: every rank would add it."""
    batch = [str(d) for d in range(len(input.shape) - 1)]
    left = ["n"] * (len(weight.shape) - 1)
    out, after = contract([(input, [*batch, "k"]), (weight, [*left, "k"])], [*batch, *left])
    if bias is None:
        return OpPlan(out, on_slices(func, [input, weight], after))
    return OpPlan(out, on_slices(func, [input, weight, bias], [*after, _summand(bias, out)]))


def _summand(bias: Spec, out: Spec) -> Spec:
    """Returns the summand of a product, sliced to its cut; it must be pending like the product."""
    first = len(out.shape) - len(bias.shape)
    dims = [out.dims[first + d] if n == out.shape[first + d] else () for d, n in enumerate(bias.shape)]
    want = bias.with_layout(dims, out.pending)
    hint = ""
    if set(bias.pending) == set(out.pending):
        if all(long[: len(short)] == short for long, short in zip(dims, bias.dims, strict=True)):
            return want
        why = "the summand is not cut as the product is"
    elif not out.pending:
        why = "the summand is a sum that is due"
    else:
        why = f"the product is pending over {', '.join(out.pending)}, and every rank would add the whole bias"
        hint = "Add it after the sum, as in F.linear(x, w).redistribute(...) + bias, or let it count on index 0 only, "
        hint += "as plait.auto_redistribute() does:"
    raise Refusal(why, [(bias, want.layout)], hint)


# ---- sums ---------------------------------------------------------------------------------------------------


@rule("sum")
def sum_(func: Any, input: Spec, *args: Any, **options: Any) -> Spec:
    """Is linear: pending axes stay pending, and the axes that cut the summed dims become pending."""
    if specs_in((args, tuple(options.values()))):
        raise Refusal("its rule does not know these arguments: tensors after the first")
    dtype = options.get("dtype")
    if dtype is not None and not dtype.is_floating_point:
        unsummed(input, why="rounding to whole numbers is not linear")
    left = dims_of_result(func, input, *args, **options)
    summed = [a for d, axes in enumerate(input.dims) if d not in left for a in axes]
    return rearranged(input, left, [*input.pending, *summed])


@rule("mean")
def mean(func: Any, input: Spec, *args: Any, **options: Any) -> Spec | OpPlan:
    """Divides the sum by the global count; 16-bit sums are taken in 32 bits, where they do not overflow."""
    out = sum_(func, input, *args, **options)
    if out.pending == input.pending:
        return out
    count = input.shape.numel() / max(1, out.shape.numel())
    dtype = options.get("dtype") or input.dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    return OpPlan(out, lambda x, *args, **more: (torch.sum(x, *args, **more | {"dtype": wide}) / count).to(dtype))


# ---- views --------------------------------------------------------------------------------------------------


def _reshaped(x: Spec, shape: Sequence[int]) -> Spec:
    """Returns the spec after a reshape, if no element has to change its rank."""
    cuts: list[Axes] = [()] * len(shape)
    refused: dict[int, str] = {}
    for d, axes in enumerate(x.dims):
        if not axes:
            continue
        n, inner = x.shape[d], math.prod(x.shape[d + 1 :])
        same_place = (d, d + len(shape) - len(x.shape))  # the same dim counted from either end comes first
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
    """True if the axes cut [n, inner] and [m, inner_m] into the same runs of elements, on every rank."""
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
    """Reshapes to global sizes, in any spelling."""
    if any(isinstance(a, torch.dtype) for a in (*args, *options.values())):
        raise Refusal("its rule knows sizes, not a view of the bytes as another dtype")
    out = _reshaped(x, on_meta(func, x, *args, **options).shape)
    return _to(out, Tensor.view if func is Tensor.view else Tensor.reshape)


@rule("squeeze")
def squeeze(func: Any, x: Spec, dim: Any = None) -> OpPlan:
    """Removes dims of global size 1."""
    dims = range(len(x.shape)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    asked = [d % len(x.shape) for d in dims] if x.shape else []
    gone = [d for d in asked if x.shape[d] == 1]
    whole(x, gone, "a dim that is squeezed must be whole")
    kept = [d for d in range(len(x.shape)) if d not in gone]
    return _to(x.new([x.shape[d] for d in kept], [x.dims[d] for d in kept], x.pending))


@rule("expand broadcast_to expand_as repeat")
def expand(func: Any, x: Spec, *args: Any, **options: Any) -> OpPlan:
    """Expands dims of size 1 to any size, repeats whole dims, and adds new dims in front."""
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
    """Puts dims in another order, and adds new ones of size 1."""
    return rearranged(x, dims_of_result(func, x, *args, **options), x.pending)


@rule("cat concat concatenate stack")
def join(func: Any, tensors: tuple[Spec, ...], dim: int = 0) -> OpPlan:
    """Joins tensors along a dim that is whole in all, or side by side along a new dim."""
    joined = on_meta(func, tensors, dim)
    d, new = dim % joined.dim(), joined.dim() > len(tensors[0].shape)
    if any(x.pending != tensors[0].pending for x in tensors):
        unsummed(*tensors, why="only some of the tensors have this sum pending")
    places = [e for e in range(joined.dim()) if not new or e != d]
    letters = [[f"{e}.{k}" if e == d else str(e) for e in places[: len(x.shape)]] for k, x in enumerate(tensors)]
    operands = list(zip(tensors, letters, strict=True))
    along = [n for names in letters for n in names if "." in n]
    whole_dim = "tensors are joined along a dim that is whole"
    result = (joined, [None if e == d else str(e) for e in range(joined.dim())])
    plan = by_letters(func, operands, [result], along, tensors[0].pending, whole_dim)
    _, after = align(operands)
    if list(tensors) == after:
        return OpPlan(plan.out[0])  # type: ignore[index]
    slices = on_slices(lambda *pieces: pieces, tensors, after)
    return OpPlan(plan.out[0], lambda tensors, dim=0: func(slices(*tensors), dim))  # type: ignore[index]
