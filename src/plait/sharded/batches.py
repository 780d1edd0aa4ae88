"""Rules of operators that work along some dims and treat every other dim as a batch, which may be cut.

    rule         works along                            examples
    ALONG        the dims that its arguments name       sort, roll, fft, cummax, var_mean, vector_norm
    TRAILING     the last dims of each operand          linalg (2), pooling, padding, interpolation (1 to 3)
    FIRST        all dims but the first                 im2col, grid_sample
    convolution, batch_norm, group_norm, scatter ...    as their letters say

These are operators of torch's library, so one row serves every function, method and module that ends in it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.sharded.rules import align, broadcast, on_meta, on_slices, rule, specs_in, unsummed, whole
from plait.sharded.spec import OpPlan, Refusal, Spec
from plait.table.layout import Layout

Letters = Sequence[str | None]
LINEAR = "roll flip _fft_c2c _fft_r2c _fft_c2r unfold diagonal trace"
ALONG = (
    "cummax cummin sort kthvalue nanmedian aminmax linalg_vector_norm var_mean std_mean argsort renorm linalg_cross "
    "nansum glu _softmax _log_softmax _safe_softmax unique_dim " + LINEAR
)
LAST = {
    (1,): "reflection_pad1d replication_pad1d avg_pool1d adaptive_max_pool1d upsample_linear1d upsample_nearest1d "
    "_upsample_nearest_exact1d",
    (2,): "reflection_pad2d replication_pad2d avg_pool2d max_pool2d_with_indices adaptive_max_pool2d max_unpool2d "
    "_adaptive_avg_pool2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa linalg_inv_ex linalg_cholesky_ex "
    "_linalg_eigh _linalg_eigvals linalg_eig linalg_eigvals linalg_qr _linalg_svd linalg_lu linalg_lu_factor_ex "
    "linalg_solve_triangular _linalg_solve_ex _linalg_det _linalg_slogdet linalg_ldl_factor_ex geqrf cholesky "
    "cholesky_solve cholesky_inverse triangular_solve linalg_matrix_exp _cdist_forward",
    (3,): "reflection_pad3d replication_pad3d avg_pool3d max_pool3d_with_indices adaptive_max_pool3d max_unpool3d "
    "_adaptive_avg_pool3d upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d pixel_shuffle "
    "pixel_unshuffle channel_shuffle native_channel_shuffle",
    (2, 1): "lu_unpack linalg_householder_product",
    (2, 1, 2): "ormqr linalg_ldl_solve linalg_lu_solve",
}
TRAILING = {name: counts for counts, names in LAST.items() for name in names.split()}
"""How many dims of each operand an operator works along; of further operands as many as of the last one."""

FIRST = {"im2col": 4, "col2im": 3, "grid_sampler_2d": 4, "grid_sampler_3d": 5}
"""How many dims their first operand has where it has a batch."""


def parts(names: str) -> list[Any]:
    """The operators of torch's library of these names, as far as it has them."""
    return [getattr(torch.ops.aten, n) for n in names.split() if hasattr(torch.ops.aten, n)]


def name_of(op: Any) -> str:
    return str(op._schema.name.partition("::")[2])


def arguments(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    given = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given |= {a.name: v for a, v in zip(op._schema.arguments, args, strict=False)} | kwargs
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


def results_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """What the operator makes of whole tensors, on meta."""
    out = on_meta(op, *args, **kwargs)
    return [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]


def by_letters(
    op: Any, operands: Sequence[tuple[Spec, Letters]], results: Sequence[tuple[Tensor, Letters]], along: set[str],
    pending: Sequence[str] = (),
) -> OpPlan:  # fmt: skip
    """The operator on pieces that are cut alike; the dims of the letters ``along`` are whole."""
    for spec, letters in operands:
        dims = [d for d, letter in enumerate(letters) if letter in along]
        whole(spec, dims, f"{name_of(op)} needs the dims that it works along whole on each rank")
    cuts, after = align(operands)
    x = operands[0][0]
    out = tuple(
        x.cache.spec(Layout(tuple(cuts.get(n or "", ()) for n in letters), tuple(pending)), t.shape, t.dtype)
        for t, letters in results
    )
    return OpPlan(out, filled(op, [s for s, _ in operands], after, out))


def filled(op: Any, before: Sequence[Spec], after: Sequence[Spec], out: Sequence[Spec]) -> Callable[..., Any]:
    """The operator on slices; where this rank has nothing of an operand, zeros, which are still a function of it."""
    if all(s.local_shape.numel() or not s.shape.numel() for s in after):
        return on_slices(op, before, after)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        nothing = [t.flatten()[:0].sum() for t in given if t.requires_grad]
        zeros = [given[0].new_zeros(s.local_shape, dtype=s.dtype) for s in out]
        numbers = [z.is_floating_point() or z.is_complex() for z in zeros]
        return [
            z + sum(n.to(z.dtype) for n in nothing) if number else z for z, number in zip(zeros, numbers, strict=True)
        ]

    return run


@rule(*parts(ALONG))
def along(op: Any, *args: Any, **kwargs: Any) -> OpPlan:
    """The dims that ``dim`` or ``dims`` names are whole, all where it names none."""
    given = arguments(op, args, kwargs)
    x: Spec = args[0]
    dims = [v for k, v in given.items() if k in ("dim", "dims", "dimension", "dim1", "dim2") and v not in (None, ())]
    flat = [d for v in dims for d in (v if isinstance(v, tuple) else (v,))]
    count = len(x.shape)
    core = {d % count for d in flat} if count and flat else set(range(count))
    if name_of(op) == "renorm":
        core = set(range(count)) - core
    if name_of(op) not in LINEAR.split():
        unsummed(*specs_in((args, *kwargs.values())))
    letters = [str(d) for d in range(count)]
    left = [n for d, n in enumerate(letters) if d not in core]
    results = results_of(op, args, kwargs)
    operands = [(s, letters[-len(s.shape) :] if s.shape else []) for s in specs_in((args, *kwargs.values()))]
    named = [(t, [*(letters if t.dim() >= count else left), *[None] * t.dim()][: t.dim()]) for t in results]
    return by_letters(op, operands, named, {str(d) for d in core}, x.pending)


@rule(*parts(" ".join(TRAILING)))
def trailing(op: Any, *args: Any, **kwargs: Any) -> OpPlan:
    """The last dims are whole, those before them are broadcast."""
    operands = specs_in((args, *kwargs.values()))
    unsummed(*operands)
    counts = list(TRAILING[name_of(op)])
    counts += counts[-1:] * (len(operands) - len(counts))
    if name_of(op) == "_linalg_solve_ex":  # A X = B, where B may have vectors
        a, b = (s.shape for s in operands)
        counts[1] = 1 if len(b) == 1 or b == a[:-1] else 2
    outer = [max(len(s.shape) - n, 0) for s, n in zip(operands, counts, strict=False)]
    batches = [s.new(s.shape[:n], [()] * n) for s, n in zip(operands, outer, strict=True)]
    shape, letters = broadcast(batches)
    lettered = [
        (s, [*names, *(f"{k}.{d}" for d in range(n, len(s.shape)))])
        for k, (s, (_, names), n) in enumerate(zip(operands, letters, outer, strict=True))
    ]
    core = {name for _, names in lettered for name in names if name and "." in name}
    batch = list(map(str, range(len(shape))))
    results = [(t, [*batch, *[None] * t.dim()][: t.dim()]) for t in results_of(op, args, kwargs)]
    return by_letters(op, lettered, results, core)


@rule(*parts(" ".join(FIRST)))
def first(op: Any, *args: Any, **kwargs: Any) -> OpPlan:
    """A batch in the first dim."""
    operands = specs_in((args, *kwargs.values()))
    unsummed(*operands)
    batch = ["n"] if len(operands[0].shape) == FIRST[name_of(op)] else []
    lettered = [(s, [*batch, *(f"{k} {d}" for d in range(len(batch), len(s.shape)))]) for k, s in enumerate(operands)]
    core = {n for _, names in lettered for n in names if n != "n"}
    results = [(t, [*batch, *[None] * (t.dim() - len(batch))]) for t in results_of(op, args, kwargs)]
    return by_letters(op, lettered, results, core)


@rule(torch.ops.aten.constant_pad_nd)
def pad(op: Any, x: Spec, widths: tuple[int, ...], value: float = 0) -> OpPlan:
    """The padded dims are whole; linear where it pads with zeros."""
    if value != 0:
        unsummed(x)
    letters = [str(d) for d in range(len(x.shape))]
    padded = {letters[-1 - k // 2] for k, n in enumerate(widths) if n}
    (result,) = results_of(op, (x, widths, value), {})
    return by_letters(op, [(x, letters)], [(result, letters)], padded, x.pending)


@rule(torch.ops.aten.convolution)
def convolution(
    op: Any, x: Spec, weight: Spec, bias: Spec | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> OpPlan:  # fmt: skip
    """Samples and output channels may be cut; a cut over input channels leaves a sum pending."""
    operands = [s for s in (x, weight, bias) if s is not None]
    unsummed(*operands)
    space = len(x.shape) - 2
    i, o = ("i", "o") if groups == 1 else ("all i", "all o")  # groups count from the first channel
    inner = ["i/g", "o/g"] if groups > 1 else [i, o]
    of_weight = [i, inner[1]] if transposed else [o, inner[0]]
    lettered: list[tuple[Spec, Letters]] = [(x, ["n", i, *(f"x{d}" for d in range(space))])]
    lettered.append((weight, [*of_weight, *(f"k{d}" for d in range(space))]))
    if bias is not None:
        lettered.append((bias, [o]))
    core = {n for _, names in lettered for n in names if n and n not in ("n", "i", "o")}
    args = (x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    over = [a for s, names in lettered for axes, n in zip(s.dims, names, strict=False) if n == "i" for a in axes]
    pending = list(dict.fromkeys(over))
    if pending and bias is not None:
        raise Refusal("each rank would add the whole bias to its share: add it after the sum, or",
                      [(s, Layout.replicated(len(s.dims))) for s in (x, weight)])  # fmt: skip
    results = [(t, ["n", o, *[None] * space]) for t in results_of(op, args, {})]
    return by_letters(op, lettered, results, core, pending)


@rule(torch.ops.aten.native_batch_norm)
def batch_norm(
    op: Any, x: Spec, weight: Spec | None, bias: Spec | None, mean: Spec | None, var: Spec | None, training: bool,
    momentum: float, eps: float,
) -> OpPlan:  # fmt: skip
    """Channels may be cut; in evaluation samples and places too.  Running statistics are cut as the channels are."""
    channel = [s for s in (weight, bias, mean, var) if s is not None]
    unsummed(x, *channel)
    for s in (mean, var) if training else ():
        if s is not None and s.dims[0] != x.dims[1]:
            dims = [
                s.dims[0] if d == 1 else tuple(a for a in axes if a not in s.dims[0]) for d, axes in enumerate(x.dims)
            ]
            raise Refusal("the running statistics lie otherwise than the channels", [(x, Layout(tuple(dims)))])
    letters = ["n", "c", *(str(d) for d in range(2, len(x.shape)))]
    args = (x, weight, bias, mean, var, training, momentum, eps)
    results = [(t, letters if t.dim() > 1 else ["c"] if t.numel() else [None]) for t in results_of(op, args, {})]
    core = {n for n in letters if n != "c"} if training else set()
    return by_letters(op, [(x, letters), *((s, ["c"]) for s in channel)], results, core)


@rule(torch.ops.aten.native_group_norm)
def group_norm(
    op: Any, x: Spec, weight: Spec | None, bias: Spec | None, n: int, channels: int, places: int, group: int, eps: float
) -> OpPlan:
    """Samples may be cut."""
    channel = [s for s in (weight, bias) if s is not None]
    unsummed(x, *channel)
    letters = ["n", "c", *(str(d) for d in range(2, len(x.shape)))]
    lettered: list[tuple[Spec, Letters]] = [(x, letters), *((s, ["c"]) for s in channel)]
    results = results_of(op, (x, weight, bias, n, channels, places, group, eps), {})
    plan = by_letters(op, lettered, [(t, ["n", *[None] * (t.dim() - 1)]) for t in results], {*letters} - {"n"})
    assert isinstance(plan.out, tuple) and plan.run is not None
    each, here = plan.run, plan.out[0].local_shape[0]
    return OpPlan(plan.out, lambda x, w, b, n, *rest: each(x, w, b, here, *rest))


@rule(*parts("scatter scatter_add scatter_reduce"))
def scatter(op: Any, x: Spec, dim: int, index: Spec, *args: Any, **kwargs: Any) -> OpPlan:
    """Places along a whole dim; the other dims may be cut where all operands are as long."""
    return _placed(op, x, dim, [x, index, *specs_in(args)], (x, dim, index, *args), kwargs)


@rule(*parts("index_add index_copy index_fill index_reduce"))
def indexed(op: Any, x: Spec, dim: int, index: Spec, *args: Any, **kwargs: Any) -> OpPlan:
    """Places along a whole dim, by an index of one dim."""
    whole(index, range(len(index.dims)), "the index must be whole")
    return _placed(op, x, dim, [x, index, *specs_in(args)], (x, dim, index, *args), kwargs)


def _placed(op: Any, x: Spec, dim: int, operands: list[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    unsummed(*operands)
    count = len(x.shape)
    d = dim % count if count else 0
    full = [s for s in operands if len(s.shape) == count]
    alike = [e for e in range(count) if e != d and len({s.shape[e] for s in full}) == 1]
    lettered: list[tuple[Spec, Letters]] = []
    core = set()
    for k, s in enumerate(operands):
        letters = [str(e) if s in full and e in alike else f"{e}.{k}" for e in range(len(s.shape))]
        core |= {n for n in letters if "." in n}
        lettered.append((s, letters))
    (result,) = results_of(op, args, kwargs)
    return by_letters(op, lettered, [(result, [str(e) if e in alike else None for e in range(count)])], core)


@rule(torch.ops.aten.index)
def index(op: Any, x: Spec, indices: tuple[Spec | None, ...]) -> OpPlan:
    """``x[i, :, j]``: the indexed dims are whole; the others keep their cuts."""
    return _by_index(op, x, indices, None)


@rule(torch.ops.aten.index_put)
def index_put(op: Any, x: Spec, indices: tuple[Spec | None, ...], values: Spec, accumulate: bool = False) -> OpPlan:
    """``x[i, :, j] = values``."""
    return _by_index(op, x, indices, values, accumulate)


def _by_index(op: Any, x: Spec, indices: tuple[Spec | None, ...], values: Spec | None, *rest: Any) -> OpPlan:
    given = [s for s in indices if s is not None]
    unsummed(*given, *([x, values] if values is not None else []))
    if any(s.dtype in (torch.bool, torch.uint8) for s in given):
        fix = [(s, Layout.replicated(len(s.dims))) for s in (x, *given)]
        raise Refusal("how many elements a mask has depends on its values", fix)
    for s in given:
        whole(s, range(len(s.dims)), "the index must be whole")
    used = [d for d, s in enumerate(indices) if s is not None]
    whole(x, used, "places of a dim can be taken where it is whole")
    shape = torch.broadcast_shapes(*(s.shape for s in given)) if given else ()
    together = used == list(range(used[0], used[-1] + 1)) if used else True
    at = used[0] if together and used else 0
    left = [str(d) for d in range(len(x.shape)) if d not in used]
    of_result: list[str | None] = [*left[:at], *[None] * len(shape), *left[at:]]
    letters = [f"at {d}" if d in used else str(d) for d in range(len(x.shape))]
    if values is None:
        cuts, _ = align([(x, letters)])
        taken = on_meta(op, x, indices)
        return OpPlan(x.new(taken.shape, [cuts.get(n or "", ()) for n in of_result], x.pending))
    sizes = [x.shape[int(n)] if n is not None else 0 for n in of_result]
    tail: list[str | None] = of_result[len(of_result) - len(values.shape) :]
    stretched = [
        n if n is None or values.shape[k] == sizes[k - len(values.shape)] else None for k, n in enumerate(tail)
    ]
    named = [n if n is not None or not values.dims[k] else f"v {k}" for k, n in enumerate(stretched)]
    whole(
        values,
        [k for k, n in enumerate(named) if n and n.startswith("v")],
        "the values must be whole where x is indexed",
    )
    cuts, after = align([(x, letters), (values, stretched)])
    if after[0] is not x:
        raise Refusal("the values are cut where x is whole", [(values, Layout.replicated(len(values.dims)))])
    slices = on_slices(lambda v: v, [values], after[1:])
    return OpPlan(x, lambda x, indices, values, *more: op(x, indices, slices(values), *more))


@rule(*parts("slice"))
def slice_(op: Any, x: Spec, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> OpPlan:
    """A span of a whole dim; all of a dim keeps its cut."""
    (result,) = results_of(op, (x, dim, start, end, step), {})
    if result.shape == x.shape:
        return OpPlan(x, lambda x, *rest: x.view_as(x))
    whole(x, [dim], "a part of a dim can be taken where it is whole")
    return OpPlan(x.new(result.shape, x.dims, x.pending))


@rule(*parts("view_as_real view_as_complex"))
def pairs(op: Any, x: Spec) -> OpPlan:
    """A last dim of two is the real and the imaginary part."""
    real = name_of(op) == "view_as_real"
    if not real:
        whole(x, [-1], "the two parts of a number must lie together")
    (result,) = results_of(op, (x,), {})
    return OpPlan(x.new(result.shape, [*x.dims, ()] if real else x.dims[:-1], x.pending))
