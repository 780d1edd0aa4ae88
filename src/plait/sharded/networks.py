"""Rules of network operators: embedding, cross-entropy, attention, norms, convolution.

embedding       table "rows/tensor width": each rank looks up its own rows, the sum is pending
cross_entropy   classes whole; over cut samples the sum is pending; the mean divides by the global count
attention       batch and heads may be cut, with one cut for q, k and v; time may not
norms           the dims that are normalised are whole; batch_norm in training keeps cut channels only
convolution     samples and output channels may be cut; a cut over input channels leaves a sum pending
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.sharded.layout import Layout
from plait.sharded.rules import (
    Letters,
    align,
    broadcast,
    by_letters,
    cut_as,
    on_slices,
    results_of,
    rule,
    specs_in,
    unsummed,
    whole,
    zeros_of,
)
from plait.sharded.spec import OpPlan, Refusal, Spec


def rows_held(tokens: Tensor, table: Tensor, start: int, padding: int | None) -> Tensor:
    """Looks up rows of this rank's part of a table, from ``start``; zeros for others; ``padding`` gets no gradient."""
    here, held = tokens - start, table.size(0)
    if not held:  # still a function of the table, so that every rank has a gradient
        return table.new_zeros(*tokens.shape, table.size(1)) + table.sum(0)
    elsewhere = (here < 0) | (here >= held)
    padding = padding - start if padding is not None and start <= padding < start + held else None
    return F.embedding(here.masked_fill(elsewhere, 0), table, padding).masked_fill(elsewhere[..., None], 0)


@rule(F.embedding)
def embedding(
    func: Any, input: Spec, weight: Spec, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> OpPlan:  # fmt: skip
    """Looks up rows of a table: [...] int64 and [rows, width] -> [..., width]."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise Refusal("its rule knows no max_norm, scale_grad_by_freq and sparse")
    unsummed(input)
    batch = [str(d) for d in range(len(input.shape))]
    cuts, after = align([(input, batch), (weight, ["row", "width"])])
    rows, start = weight.shape[0], after[1].start[0]
    padding = None if padding_idx is None else padding_idx % rows

    def of_mine(i: Tensor, w: Tensor) -> Any:
        if not cuts["row"]:
            return F.embedding(i, w, padding)
        if i.device.type == "cpu" and i.numel() and not 0 <= int(i.min()) <= int(i.max()) < rows:
            raise IndexError(f"embedding: an index is outside the table of {rows} rows")
        return rows_held(i.as_subclass(Tensor), w.as_subclass(Tensor), start, padding)  # which reads sizes

    run = on_slices(of_mine, [input, weight], after)
    dims = cut_as([*batch, "width"], cuts)
    out = weight.new((*input.shape, weight.shape[1]), dims, [*weight.pending, *cuts["row"]])
    return OpPlan(out, lambda i, w, *args, **options: run(i, w))


@rule("cross_entropy nll_loss")
def cross_entropy(
    func: Any, input: Spec, target: Spec, weight: Spec | None = None, size_average: None = None,
    ignore_index: int = -100, reduce: None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> OpPlan:  # fmt: skip
    """Takes [samples, classes, ...] and class numbers [samples, ...]; in nats, summed or averaged over the samples."""
    if size_average is not None or reduce is not None:
        raise Refusal("its rule knows no deprecated arguments", hint="Use reduction=.")
    if target.shape == input.shape:
        raise Refusal("its rule knows targets that are class numbers, not probabilities")
    unsummed(input, target, weight)
    classes = min(1, len(input.shape) - 1)
    whole(input, [classes], "the classes are cut; plait.cross_entropy_sum computes on cut classes. Otherwise")
    whole(weight, [0], "the class weights must be whole")
    letters = [str(d) for d in range(len(input.shape))]
    batch = [n for d, n in enumerate(letters) if d != classes]
    cuts, after = align([(input, letters), (target, batch)])
    dims = cut_as(batch, cuts)
    over = [a for axes in dims for a in axes]
    if reduction == "mean" and over and target.layout.cut:
        raise Refusal(
            "the mean needs the number of targets on all ranks",
            [(target, Layout.replicated(len(batch)))],
            "Use reduction='sum' and divide by the global count, or",
        )
    slices = on_slices(lambda *pieces: pieces, [input, target], after)
    smoothing = {} if func is F.nll_loss else {"label_smoothing": label_smoothing}

    def run(input: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **options: Any) -> Any:
        x, t = slices(input, target)
        how = reduction if not over or reduction == "none" else "sum"
        if over and t.numel() == 0 and how != "none":
            loss = x.sum()  # the sum of nothing is 0, and still a function of the input
        else:
            loss = func(x, t, weight, ignore_index=ignore_index, reduction=how, **smoothing)
        if how == reduction:
            return loss
        counts = target != ignore_index
        if weight is None:
            return loss / counts.sum()
        return loss / weight[target.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum()

    return OpPlan(input.new(target.shape, dims) if reduction == "none" else input.new((), (), over), run)


@rule("scaled_dot_product_attention")
def attention(
    func: Any, query: Spec, key: Spec, value: Spec, attn_mask: Spec | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> OpPlan:  # fmt: skip
    """Takes [..., heads, time, width]; masks broadcast over batch and heads."""
    given = [s for s in (query, key, value, attn_mask) if s is not None]
    unsummed(*given)
    if dropout_p:
        raise Refusal("its dropout would depend on the layout", hint="Use dropout_p=0.")
    for s in given:
        whole(s, range(-2, 0), "attention needs time and width whole on each rank; batch and heads may be cut")
    grouped = enable_gqa and len(query.shape) > 2 and query.shape[-3] != key.shape[-3]
    inner = 3 if grouped else 2  # dims that are not broadcast
    if len({tuple(s.shape[:-inner]) for s in (query, key, value)}) > 1:
        raise Refusal("its rule knows query, key and value of one batch shape", hint="Expand them to it first.")
    shape, letters = broadcast(given, [min(inner, len(s.shape)) for s in given])
    operands: list[tuple[Spec, Letters]] = []
    for k, (s, names) in enumerate(zip(given, letters, strict=True)):
        head = ["head" if s.shape[-3] > 1 else None] if grouped and len(s.shape) > 2 else []
        operands.append((s, [*names, *head, f"time {k}", f"width {k}"]))
    cuts, after = align(operands, grouped="head")
    dims = cut_as([str(d) for d in range(len(shape))], cuts)
    if grouped:
        over, n = cuts.get("head", ()), key.shape[-3]
        if n % query.comm.mesh.count(over):
            raise Refusal(
                f"{n} key heads on {query.comm.mesh.count(over)} ranks: each rank needs whole groups of "
                f"{query.shape[-3] // max(n, 1)} query heads; cut the heads over a number of ranks that divides {n}",
                [(s, Layout((*s.dims[:-3], (), (), ()))) for s in (query, key, value)],
            )
        shape, dims = (*shape, query.shape[-3]), [*dims, over]
    out = query.new((*shape, query.shape[-2], value.shape[-1]), [*dims, (), ()])
    if not out.local_shape.numel():  # torch's attention of nothing does not depend on the mask
        return OpPlan(out, lambda *args, **options: zeros_of([out])(*args, **options)[0])
    return OpPlan(out, on_slices(func, given, after))


@rule("layer_norm rms_norm")
def layer_norm(
    func: Any, input: Spec, normalized_shape: Any, weight: Spec | None = None, bias: Any = None, *args: Any,
    eps: float | None = None,
) -> Spec:  # fmt: skip
    """Requires the normalised dims, weight and bias whole; the gradients of weight and bias are shares.

    ``rms_norm`` has ``eps`` in the position of ``layer_norm``'s bias.
    """
    n = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    given = specs_in((weight, bias))
    unsummed(input, *given)
    whole(input, range(-n, 0), "a norm needs the dims that it normalises whole on each rank")
    for s in given:
        whole(s, range(n), "weight and bias of a norm must be whole")
    return input


@rule(torch.ops.aten.convolution)
def convolution(
    op: Any, x: Spec, weight: Spec, bias: Spec | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> OpPlan:  # fmt: skip
    """Allows cut samples and output channels; a cut over input channels leaves a sum pending."""
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
    results = [(t, ["n", o, *[None] * space]) for t in results_of(op, *args)]
    return by_letters(op, lettered, results, core, pending)


@rule(torch.ops.aten.native_batch_norm)
def batch_norm(
    op: Any, x: Spec, weight: Spec | None, bias: Spec | None, mean: Spec | None, var: Spec | None, training: bool,
    momentum: float, eps: float,
) -> OpPlan:  # fmt: skip
    """Allows cut channels; in evaluation also samples and places.  Running statistics are cut like the channels."""
    channel = specs_in((weight, bias, mean, var))
    unsummed(x, *channel)
    for s in (mean, var) if training else ():
        if s is not None and s.dims[0] != x.dims[1]:
            dims = [
                s.dims[0] if d == 1 else tuple(a for a in axes if a not in s.dims[0]) for d, axes in enumerate(x.dims)
            ]
            raise Refusal("the running statistics are not cut as the channels are", [(x, Layout(tuple(dims)))])
    letters = ["n", "c", *(str(d) for d in range(2, len(x.shape)))]
    args = (x, weight, bias, mean, var, training, momentum, eps)
    results = [(t, letters if t.dim() > 1 else ["c"] if t.numel() else [None]) for t in results_of(op, *args)]
    core = {n for n in letters if n != "c"} if training else set()
    return by_letters(op, [(x, letters), *((s, ["c"]) for s in channel)], results, core)
