"""Rules of reductions along dims, and of what normalises along a dim.

sum, mean      over a cut dim: each rank's part, pending over its axes; the mean divides by the *global* count
max, softmax,  the dim must be whole, and nothing pending
var, norm ...
"""

import math
from typing import Any

import torch
from torch import Tensor

from plait.sharded.rules import dims_of_result, on_meta, on_plain, rearranged, rule, specs_in, unsummed, whole
from plait.sharded.spec import OpPlan, Refusal, Spec


def _reduced(func: Any, x: Spec, args: Any, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The dims that a function reduces, and the dim of ``x`` that each dim of its result is, -1 for a reduced one."""
    if specs_in((args, tuple(options.values()))):
        raise Refusal("its rule does not know these arguments: tensors beside the first")
    left = dims_of_result(func, x, *args, **options)
    return [d for d in range(len(x.shape)) if d not in left], left


def _whole_dims(func: Any, x: Spec, dim: Any, *, linear: bool = False) -> None:
    """Refuses a cut dim (one, several, or () for all) that a function works along and, unless linear, a pending sum."""
    n = len(x.shape)
    dims = dim if isinstance(dim, tuple) else (dim,)
    if any(not -max(1, n) <= d < max(1, n) for d in dims):
        raise Refusal(f"dim {dim} is not among its {n} dims")
    if not linear:
        unsummed(x)
    whole(x, (dims or range(n)) if n else (), f"{func.__name__} needs the dims that it works along whole on each rank")


@rule("sum")
def sum_(func: Any, input: Spec, *args: Any, **options: Any) -> Spec:
    """Linear: what is pending stays so, and what was cut along the dims becomes pending."""
    dtype = options.get("dtype")
    if dtype is not None and not dtype.is_floating_point:
        unsummed(input, why="rounding to whole numbers is not linear")
    dims, left = _reduced(func, input, args, options)
    return rearranged(input, left, [*input.pending, *(a for d in dims for a in input.dims[d])])


@rule("mean")
def mean(func: Any, input: Spec, *args: Any, **options: Any) -> Spec | OpPlan:
    """The sum over the global count."""
    out = sum_(func, input, *args, **options)
    dims, _ = _reduced(func, input, args, options)
    if not any(input.dims[d] for d in dims):
        return out
    count = math.prod(input.shape[d] for d in dims)
    return OpPlan(out, lambda input, *args, **options: torch.sum(input, *args, **options) / count)


@rule("amax amin all any logsumexp prod count_nonzero std var argmax argmin norm max min median mode")
def reduction(func: Any, input: Spec, *args: Any, **options: Any) -> OpPlan:
    """Along whole dims, of what is not pending; some give values and indices along one dim."""
    if func.__name__ in ("max", "min") and specs_in(args):
        raise Refusal("between two tensors its names are torch.maximum and torch.minimum")
    dims, left = _reduced(func, input, args, options)
    out = rearranged(input, left, ())
    _whole_dims(func, input, tuple(dims))
    if func.__name__ == "norm":
        return OpPlan(out, on_plain(func))
    if func.__name__ in ("std", "var") and not input.local_shape.numel() and input.shape.numel():
        keepdim = len(left) == len(input.shape)
        # nothing here, and no warning about it
        return OpPlan(out, lambda input, *args, **options: input.sum(dims, keepdim))
    return OpPlan(out if isinstance(on_meta(func, input, *args, **options), Tensor) else (out, out))


@rule("topk sort")
def ordered(func: Any, input: Spec, *args: Any, dim: int = -1, **options: Any) -> OpPlan:
    """Along a whole dim; values and indices."""
    if not input.shape:
        raise Refusal("it has no dims")
    k = args[0] if func.__name__ == "topk" and args else options.get("k")
    dim = next((a for a in args[func.__name__ == "topk" :] if type(a) is int), dim)
    _whole_dims(func, input, dim)
    shape = list(input.shape)
    if k is not None:
        shape[dim] = k
    out = input.new(shape, input.dims)
    return OpPlan((out, out))


@rule("flip")
def flip(func: Any, input: Spec, *places: Any, dims: Any = ()) -> Spec:
    """The shape stays, and all dims that are turned must be whole."""
    dims = dims or (places[0] if places and isinstance(places[0], tuple) else places)
    if dims:
        _whole_dims(func, input, dims, linear=True)
    return input


@rule("softmax log_softmax softmin cumsum cumprod logcumsumexp")
def along(func: Any, input: Spec, dim: Any = None, *args: Any, **options: Any) -> Spec:
    """The shape stays, and one dim must be whole."""
    if dim is None:
        raise Refusal("give the dim")
    _whole_dims(func, input, dim, linear=func.__name__ == "cumsum")
    return input


@rule("tril triu")
def triangle(func: Any, input: Spec, diagonal: int = 0) -> Spec:
    """Linear; the last two dims whole."""
    _whole_dims(func, input, (-2, -1), linear=True)
    return input


@rule("layer_norm")
def layer_norm(
    func: Any, input: Spec, normalized_shape: Any, weight: Spec | None = None, bias: Spec | None = None,
    eps: float = 1e-5, *args: Any,
) -> Spec:  # fmt: skip
    """The normalised dims whole; weight and bias whole, their gradients come out as shares."""
    n = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    unsummed(*(s for s in (input, weight, bias) if s is not None))
    whole(input, range(-n, 0), "a norm needs the dims that it normalises whole on each rank")
    for s in (weight, bias):
        if s is not None:
            whole(s, range(n), "weight and bias of a norm lie along whole dims")
    return input


@rule("rms_norm")
def rms_norm(
    func: Any, input: Spec, normalized_shape: Any, weight: Spec | None = None, eps: float | None = None
) -> Spec:
    """As ``layer_norm``."""
    return layer_norm(func, input, normalized_shape, weight)


@rule("normalize")
def normalize(func: Any, input: Spec, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> OpPlan:
    """Divides by the norm along a whole dim."""
    return OpPlan(along(func, input, dim), on_plain(func))
