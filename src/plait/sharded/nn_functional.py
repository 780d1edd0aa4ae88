"""Rules of what networks add to algebra: embedding, cross-entropy, attention.

embedding       table "rows/tensor width": each rank looks up the rows that it holds, the sum is pending
cross_entropy   classes whole; over cut samples the sum is pending; the mean divides by the global count
attention       batch and heads may be cut, alike in q, k and v; time may not
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from plait.sharded.rules import align, broadcast, on_plain, on_slices, rule, unsummed, whole
from plait.sharded.spec import OpPlan, Refusal, Spec
from plait.table.layout import Layout


def rows_held(tokens: Tensor, table: Tensor, start: int, padding: int | None) -> Tensor:
    """Rows of a table of which this rank has those from ``start`` on, or zeros; row ``padding`` gets no gradient."""
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
    """Rows of a table: [...] int64 and [rows, width] -> [..., width]."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise Refusal("its rule knows no max_norm, scale_grad_by_freq and sparse")
    unsummed(input)
    batch = [str(d) for d in range(len(input.shape))]
    cuts, after = align([(input, batch), (weight, ["row", "width"])])
    rows, start = weight.shape[0], after[1].start[0]
    padding = None if padding_idx is None else padding_idx % rows

    plain = on_plain(rows_held)  # it reads sizes

    def of_mine(i: Tensor, w: Tensor) -> Any:
        if not cuts["row"]:
            return F.embedding(i, w, padding)
        if i.device.type == "cpu" and i.numel() and not 0 <= int(i.min()) <= int(i.max()) < rows:
            raise IndexError(f"embedding: an index is outside the table of {rows} rows")
        return plain(i, w, start, padding)

    run = on_slices(of_mine, [input, weight], after)
    dims = [*(cuts[n] for n in batch), cuts["width"]]
    out = weight.new((*input.shape, weight.shape[1]), dims, [*weight.pending, *cuts["row"]])
    return OpPlan(out, lambda i, w, *args, **options: run(i, w))


@rule("cross_entropy nll_loss")
def cross_entropy(
    func: Any, input: Spec, target: Spec, weight: Spec | None = None, size_average: None = None,
    ignore_index: int = -100, reduce: None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> OpPlan:  # fmt: skip
    """[samples, classes, ...] and class numbers [samples, ...]; nats, summed or averaged over the samples."""
    if size_average is not None or reduce is not None:
        raise Refusal("its rule knows no deprecated arguments", hint="Use reduction=.")
    if target.shape == input.shape:
        raise Refusal("its rule knows targets that are class numbers, not probabilities")
    unsummed(*(s for s in (input, target, weight) if s is not None))
    classes = min(1, len(input.shape) - 1)
    whole(input, [classes], "the classes are cut; plait.cross_entropy_sum computes on cut classes. Otherwise")
    if weight is not None:
        whole(weight, [0], "the class weights must be whole")
    letters = [str(d) for d in range(len(input.shape))]
    batch = [n for d, n in enumerate(letters) if d != classes]
    cuts, after = align([(input, letters), (target, batch)])
    dims = [cuts[n] for n in batch]
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
            loss = x.sum()  # of nothing: 0, and still a function of the input
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
    """[..., heads, time, width]; masks broadcast over batch and heads."""
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
    outer = [s.new(s.shape[:-inner], [()] * (len(s.shape) - inner)) for s in given]
    shape, letters = broadcast(outer)
    operands = []
    for k, (s, (_, names)) in enumerate(zip(given, letters, strict=True)):
        head = ["head" if s.shape[-3] > 1 else None] if grouped and len(s.shape) > 2 else []
        operands.append((s, [*names, *head, f"time {k}", f"width {k}"]))
    cuts, after = align(operands, grouped="head")
    dims = [cuts.get(str(d), ()) for d in range(len(shape))]
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
    return OpPlan(out, on_slices(func, given, after))
