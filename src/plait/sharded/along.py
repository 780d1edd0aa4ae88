"""Rules of torch's own operators that work along some dims and treat every other dim as a batch, which may be cut.

    rule         works along                            examples
    ALONG        the dims that its arguments name       amax, softmax, sort, select, split, roll, fft, var, norm
    TRAILING     the last dims of each operand          tril, linalg (2), pooling, padding, interpolation (1 to 3)
    PLACES       one dim, by an index                   gather, index_select, scatter, index_add

    [4, 6/tensor].select(0, 1)     -> [6/tensor]
    [4, 6/tensor].split(2, dim=1)     refused: dim 1 is cut, and a part of it is on some ranks only

These are operators of torch's library, so one word covers every function, method and module that ends in it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from plait.sharded.layout import Layout
from plait.sharded.rules import (
    Letters,
    align,
    broadcast,
    by_letters,
    cut_as,
    name_of,
    on_meta,
    on_slices,
    parts,
    results_of,
    rule,
    specs_in,
    unsummed,
    whole,
)
from plait.sharded.spec import OpPlan, Refusal, Spec

TAKEN = "slice select unbind split split_with_sizes narrow_copy"
LINEAR = "roll flip cumsum _fft_c2c _fft_r2c _fft_c2r unfold diagonal trace " + TAKEN
"""Operators that may act on a pending sum."""
ALONG = (
    "amax amin all any prod logsumexp count_nonzero std var argmax argmin max min median mode topk sort argsort "
    "cumprod logcumsumexp cummax cummin kthvalue nanmedian aminmax linalg_vector_norm var_mean std_mean renorm "
    "linalg_cross nansum glu _softmax _log_softmax _safe_softmax unique_dim " + LINEAR
)
LAST = {
    (1,): "reflection_pad1d replication_pad1d avg_pool1d adaptive_max_pool1d upsample_linear1d upsample_nearest1d "
    "_upsample_nearest_exact1d",
    (2,): "tril triu reflection_pad2d replication_pad2d avg_pool2d max_pool2d_with_indices adaptive_max_pool2d "
    "max_unpool2d _adaptive_avg_pool2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d "
    "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa linalg_inv_ex "
    "linalg_cholesky_ex _linalg_eigh _linalg_eigvals linalg_eig linalg_eigvals linalg_qr _linalg_svd linalg_lu "
    "linalg_lu_factor_ex linalg_solve_triangular _linalg_solve_ex _linalg_det _linalg_slogdet linalg_ldl_factor_ex "
    "geqrf cholesky cholesky_solve cholesky_inverse triangular_solve linalg_matrix_exp _cdist_forward",
    (3,): "reflection_pad3d replication_pad3d avg_pool3d max_pool3d_with_indices adaptive_max_pool3d max_unpool3d "
    "_adaptive_avg_pool3d upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d pixel_shuffle "
    "pixel_unshuffle channel_shuffle native_channel_shuffle",
    (2, 1): "lu_unpack linalg_householder_product",
    (2, 1, 2): "ormqr linalg_ldl_solve linalg_lu_solve",
}
TRAILING = {name: counts for counts, names in LAST.items() for name in names.split()}
"""The number of dims of each operand that an operator works along; further operands have the last number."""

A_PART = "a part of a dim can be taken where it is whole"


@rule(*parts(ALONG))
def along(op: Any, *args: Any, **kwargs: Any) -> OpPlan:
    """Requires whole dims if ``dim`` or ``dims`` name them, otherwise all dims."""
    named = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    named |= {a.name: v for a, v in zip(op._schema.arguments, args, strict=False)} | kwargs
    x: Spec = args[0]
    name, count, operands = name_of(op), len(x.shape), specs_in((args, *kwargs.values()))
    asked = [
        v for k, v in named.items() if k in ("dim", "dims", "dimension", "dim1", "dim2") and v not in (None, (), [])
    ]
    flat = [d for v in asked for d in (v if isinstance(v, tuple | list) else (v,))]
    core = {d % count for d in flat} if count and flat else set(range(count))
    if name == "renorm":
        core = set(range(count)) - core
    if name not in LINEAR.split() or named.get("dtype") not in (None, x.dtype):
        unsummed(*operands)
    results = results_of(op, *args, **kwargs)
    if name == "slice" and results[0].shape == x.shape:
        return OpPlan(x, lambda x, *rest: x.view_as(x))
    letters = [str(d) for d in range(count)]
    left = [n for d, n in enumerate(letters) if d not in core]
    lettered = [(s, letters[-len(s.shape) :] if s.shape else []) for s in operands]
    made: list[Any] = [(t, [*(letters if t.dim() >= count else left), *[None] * t.dim()][: t.dim()]) for t in results]
    plan = by_letters(op, lettered, made, {str(d) for d in core}, x.pending, A_PART if name in TAKEN.split() else "")
    return OpPlan(plan.out, op) if name in TAKEN.split() else plan


@rule(*parts(" ".join(TRAILING)))
def trailing(op: Any, *args: Any, **kwargs: Any) -> OpPlan:
    """Requires whole last dims, and broadcasts those before them."""
    operands, linear = specs_in((args, *kwargs.values())), name_of(op) in ("tril", "triu")
    if not linear:
        unsummed(*operands)
    counts = list(TRAILING[name_of(op)])
    counts += counts[-1:] * (len(operands) - len(counts))
    if name_of(op) == "_linalg_solve_ex":  # A X = B, B may have vectors
        a, b = (s.shape for s in operands)
        counts[1] = 1 if len(b) == 1 or b == a[:-1] else 2
    inner = [min(n, len(s.shape)) for s, n in zip(operands, counts, strict=False)]
    shape, letters = broadcast(operands, inner)
    core = [[f"{k}.{d}" for d in range(n)] for k, n in enumerate(inner)]
    lettered = [(s, [*names, *own]) for s, names, own in zip(operands, letters, core, strict=True)]
    batch = list(map(str, range(len(shape))))
    results = [(t, [*batch, *[None] * t.dim()][: t.dim()]) for t in results_of(op, *args, **kwargs)]
    return by_letters(op, lettered, results, {n for names in core for n in names}, operands[0].pending)


@rule(torch.ops.aten.constant_pad_nd)
def pad(op: Any, x: Spec, widths: tuple[int, ...], value: float = 0) -> OpPlan:
    """Requires whole padded dims; linear if it pads with zeros."""
    if value != 0:
        unsummed(x)
    letters = [str(d) for d in range(len(x.shape))]
    padded = {letters[-1 - k // 2] for k, n in enumerate(widths) if n}
    (result,) = results_of(op, x, widths, value)
    return by_letters(op, [(x, letters)], [(result, letters)], padded, x.pending)


@rule(*parts("view_as_real view_as_complex"))
def pairs(op: Any, x: Spec) -> OpPlan:
    """Treats a last dim of two as the real and the imaginary part."""
    real = name_of(op) == "view_as_real"
    if not real:
        whole(x, [-1], "the two parts of a number must be on one rank")
    (result,) = results_of(op, x)
    return OpPlan(x.new(result.shape, [*x.dims, ()] if real else x.dims[:-1], x.pending))


# ---- by an index --------------------------------------------------------------------------------------------


@rule(*parts("gather index_select scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce"))
def places(op: Any, x: Spec, dim: int, index: Spec, *args: Any, **kwargs: Any) -> OpPlan:
    """Requires the indexed dim whole; the other dims may be cut if all operands are as long.

    ``gather`` and ``index_select`` are linear in x.
    """
    operands, count = [x, index, *specs_in(args)], len(x.shape)
    if not count:
        raise Refusal("it has no dims")
    linear = name_of(op) in ("gather", "index_select")
    unsummed(*operands[linear:])
    if name_of(op).startswith("index_"):
        whole(index, range(len(index.dims)), "the index must be whole")
    d = dim % count
    full = [s for s in operands if len(s.shape) == count and not (s is index and name_of(op).startswith("index_"))]
    equal = [e for e in range(count) if e != d and len({s.shape[e] for s in full}) == 1]
    core = [
        [str(e) if s in full and e in equal else f"{e}.{k}" for e in range(len(s.shape))]
        for k, s in enumerate(operands)
    ]
    (result,) = results_of(op, x, dim, index, *args, **kwargs)
    made: Letters = [str(e) if e in equal else None for e in range(count)]
    separate = {n for names in core for n in names if "." in n}
    return by_letters(op, list(zip(operands, core, strict=True)), [(result, made)], separate, x.pending)


@rule(torch.ops.aten.index)
def index(op: Any, x: Spec, indices: tuple[Spec | None, ...]) -> OpPlan:
    """``x[i, :, j]``: the indexed dims must be whole; the others keep their cuts."""
    letters, of_result = _indexed(x, indices)
    unsummed(x)
    cuts, _ = align([(x, letters)])
    return OpPlan(x.new(on_meta(op, x, indices).shape, cut_as(of_result, cuts)))


@rule(torch.ops.aten.index_put)
def index_put(op: Any, x: Spec, indices: tuple[Spec | None, ...], values: Spec, accumulate: bool = False) -> OpPlan:
    """``x[i, :, j] = values``."""
    letters, of_result = _indexed(x, indices)
    unsummed(x, values)
    tail = of_result[len(of_result) - len(values.shape) :]
    sizes = [0 if n is None else x.shape[int(n)] for n in tail]
    stretched = [None if n is None or size != m else n for n, size, m in zip(tail, sizes, values.shape, strict=True)]
    loose = [k for k, n in enumerate(stretched) if n is None]
    whole(values, loose, "the values must be whole where x is indexed")
    _, after = align([(x, letters), (values, stretched)])
    if after[0] is not x:
        raise Refusal("the values are cut where x is whole", [(values, Layout.replicated(len(values.dims)))])
    slices = on_slices(lambda v: v, [values], after[1:])
    return OpPlan(x, lambda x, indices, values, *more: op(x, indices, slices(values), *more))


def _indexed(x: Spec, indices: tuple[Spec | None, ...]) -> tuple[list[str], Sequence[str | None]]:
    """Returns the letters of x and of the elements taken from it; the indices and the indexed dims must be whole."""
    given = [s for s in indices if s is not None]
    unsummed(*given)
    if any(s.dtype in (torch.bool, torch.uint8) for s in given):
        fix = [(s, Layout.replicated(len(s.dims))) for s in (x, *given)]
        raise Refusal("the number of a mask's elements depends on its values", fix)
    for s in given:
        whole(s, range(len(s.dims)), "the index must be whole")
    used = [d for d, s in enumerate(indices) if s is not None]
    whole(x, used, A_PART)
    shape = torch.broadcast_shapes(*(s.shape for s in given)) if given else ()
    together = used == list(range(used[0], used[-1] + 1)) if used else True
    at = used[0] if together and used else 0
    left = [str(d) for d in range(len(x.shape)) if d not in used]
    return [f"at {d}" if d in used else str(d) for d in range(len(x.shape))], [
        *left[:at], *[None] * len(shape), *left[at:]
    ]  # fmt: skip
