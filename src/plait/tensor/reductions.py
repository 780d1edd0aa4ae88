"""Rules of reductions along dims, and of what normalises along a dim.

sum, mean      over a cut dim: each rank's part, pending over its axes; the mean divides by the *global* count
max, softmax,  the dim must be whole, and nothing pending
var, norm ...
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from plait.tensor.rules import Axes, on_plain, rule, unsummed, whole
from plait.tensor.spec import Plan, Refusal, Spec


def _dims(x: Spec, dim: Any) -> list[int]:
    if dim is None or dim == ():
        return list(range(len(x.shape)))
    dims = dim if isinstance(dim, tuple) else (dim,)
    if any(not -max(1, len(x.shape)) <= d < max(1, len(x.shape)) for d in dims):
        raise Refusal(f"dim {dim} is not among its {len(x.shape)} dims")
    return [d % len(x.shape) for d in dims] if x.shape else []


def _left(x: Spec, dims: list[int], keepdim: bool) -> tuple[list[int], list[Axes]]:
    """Shape and cuts after a reduction."""
    kept = [(1, ()) if d in dims else (x.shape[d], x.dims[d]) for d in range(len(x.shape)) if keepdim or d not in dims]
    return [n for n, _ in kept], [axes for _, axes in kept]


@rule("sum")
def sum_(func: Any, input: Spec, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    """Linear: what is pending stays so, and what was cut along the dims becomes pending."""
    if dtype is not None and not dtype.is_floating_point:
        unsummed(input, why="rounding to whole numbers is not linear")
    dims = _dims(input, dim)
    return input.new(*_left(input, dims, keepdim), [*input.pending, *(a for d in dims for a in input.dims[d])])


@rule("mean")
def mean(func: Any, input: Spec, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec | Plan:
    """The sum over the global count."""
    dims = _dims(input, dim)
    out = sum_(func, input, dim, keepdim)
    if not any(input.dims[d] for d in dims):
        return out
    count = math.prod(input.shape[d] for d in dims)

    def run(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return torch.sum(x, dims, keepdim, dtype=dtype) / count

    return Plan(out, run)


@rule("amax amin all any logsumexp prod count_nonzero std var argmax argmin")
def reduction(
    func: Any, input: Spec, dim: Any = None, *args: Any, keepdim: bool = False, **options: Any
) -> Spec | Plan:
    """Along whole dims, of what is not pending."""
    name = func.__name__
    if name in ("std", "var"):  # (unbiased) or (dim, unbiased, keepdim)
        dim, args = (None, ()) if isinstance(dim, bool) else (dim, args[1:])
    keepdim = args[0] if args else keepdim
    dims = _dims(input, dim)
    unsummed(input)
    whole(input, dims, f"{name} needs the dims that it reduces whole on each rank")
    out = input.new(*_left(input, dims, keepdim))
    if name in ("std", "var") and not input.local_shape.numel() and input.shape.numel():
        return Plan(out, lambda x, *args, **options: x.sum(dims, keepdim))  # nothing here, and no warning about it
    return out


@rule("norm")
def norm(func: Any, input: Spec, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Plan:
    """``x.norm(p, dim)`` along whole dims."""
    unsummed(input)
    whole(input, _dims(input, dim), "norm needs the dims that it reduces whole on each rank")
    return Plan(input.new(*_left(input, _dims(input, dim), keepdim)), on_plain(func))


@rule("max min median mode")
def extreme(func: Any, input: Spec, dim: Any = None, keepdim: bool = False) -> Spec | Plan:
    """With a dim: values and indices; without: one value; with a tensor: element by element."""
    if isinstance(dim, Spec):
        raise Refusal("between two tensors its names are torch.maximum and torch.minimum")
    unsummed(input)
    whole(input, _dims(input, dim), f"{func.__name__} needs the dims that it reduces whole on each rank")
    out = input.new(*_left(input, _dims(input, dim), keepdim))
    return out if dim is None else Plan((out, out))


@rule("topk sort")
def ordered(func: Any, input: Spec, *args: Any, dim: int = -1, **options: Any) -> Plan:
    """Along a whole dim; values and indices."""
    k = args[0] if func.__name__ == "topk" and args else options.get("k")
    dim = next((a for a in args[func.__name__ == "topk" :] if type(a) is int), dim)
    unsummed(input)
    whole(input, [dim], f"{func.__name__} needs its dim whole on each rank")
    shape = list(input.shape)
    if k is not None:
        shape[dim] = k
    out = input.new(shape, input.dims)
    return Plan((out, out))


@rule("flip")
def flip(func: Any, input: Spec, *places: Any, dims: Any = ()) -> Spec:
    """The shape stays, and all dims that are turned must be whole."""
    dims = dims or (places[0] if places and isinstance(places[0], tuple) else places)
    whole(input, _dims(input, dims) if dims else (), "flip needs the dims that it turns whole on each rank")
    return input


@rule("softmax log_softmax softmin cumsum cumprod logcumsumexp")
def along(func: Any, input: Spec, dim: Any = None, *args: Any, **options: Any) -> Spec:
    """The shape stays, and one dim must be whole."""
    if dim is None:
        raise Refusal("give the dim")
    if func.__name__ != "cumsum":
        unsummed(input)
    whole(input, _dims(input, dim), f"{func.__name__} along a dim needs it whole on each rank")
    return input


@rule("tril triu")
def triangle(func: Any, input: Spec, diagonal: int = 0) -> Spec:
    """Linear; the last two dims whole."""
    whole(input, range(-2, 0), f"{func.__name__} needs the last two dims whole on each rank")
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
def normalize(func: Any, input: Spec, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Plan:
    """Divides by the norm along a whole dim."""
    return Plan(along(func, input, dim), on_plain(func))
