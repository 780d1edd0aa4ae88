"""Rules of matrix products: letters in, letters out.

    matmul   [m k] [k n] -> [m n]        a cut over m or n stays; a cut over k leaves a sum pending
    linear   [.. k] [n k] -> [.. n]      "n/tensor k" computes columns, "n k/tensor" leaves a pending sum

A product is linear in each factor: one factor may be pending over an axis over which the other is replicated.
"""

from collections.abc import Sequence
from typing import Any

from plait.sharded.rules import align, broadcast, finite, on_plain, on_slices, rule, unsummed
from plait.sharded.spec import OpPlan, Refusal, Spec

Letters = Sequence[str | None]


def contract(operands: Sequence[tuple[Spec, Letters]], out: Sequence[str]) -> tuple[Spec, list[Spec]]:
    """The spec of a product with these letters, and the factors sliced to a common cut."""
    specs = [s for s, _ in operands]
    due = [a for s in specs for a in s.pending]
    if len(set(due)) < len(due):
        unsummed(*specs, why="the product of two sums is not the sum of products")
    cuts, after = align(operands)
    summed = [a for letter, axes in cuts.items() if letter not in out for a in axes]
    size = {c: n for s, letters in operands for c, n in zip(letters, s.shape, strict=True)}
    return specs[0].new([size[c] for c in out], [cuts[c] for c in out], [*due, *summed]), after


def _product(func: Any, operands: Sequence[tuple[Spec, Letters]], out: Sequence[str]) -> OpPlan:
    result, after = contract(operands, out)
    return OpPlan(result, on_slices(func, [s for s, _ in operands], after))


@rule("matmul mm bmm mv dot __matmul__ __rmatmul__")
def matmul(func: Any, a: Spec, b: Spec) -> OpPlan:
    """Vectors, matrices and batches of them, with broadcasting."""
    if getattr(func, "__name__", "") == "__rmatmul__":
        raise Refusal("write a @ b with tensors on both sides")
    if not a.shape or not b.shape:
        raise Refusal("a product of matrices needs at least one dim on each side")
    left, right = ["m", "k"][-len(a.shape) :], ["k", "n"][: len(b.shape)]
    batch, ((_, a_outer), (_, b_outer)) = broadcast([s.new(s.shape[:-2], [()] * len(s.shape[:-2])) for s in (a, b)])
    out = [*map(str, range(len(batch))), *left[:-1], *right[1:]]
    return _product(func, [(a, [*a_outer, *left]), (b, [*b_outer, *right])], out)


@rule("linear")
def linear(func: Any, input: Spec, weight: Spec, bias: Spec | None = None) -> Spec | OpPlan:
    """``input @ weight.T + bias``; the bias may not meet a pending product, or every rank would add it."""
    batch = [str(d) for d in range(len(input.shape) - 1)]
    left = ["n"] * (len(weight.shape) - 1)
    out, after = contract([(input, [*batch, "k"]), (weight, [*left, "k"])], [*batch, *left])
    if bias is None:
        return OpPlan(out, on_slices(func, [input, weight], after))
    return OpPlan(out, on_slices(func, [input, weight, bias], [*after, _summand(bias, out)]))


def _summand(bias: Spec, out: Spec) -> Spec:
    """What is added to a product, sliced to its cut; it must be pending like the product."""
    first = len(out.shape) - len(bias.shape)
    dims = [out.dims[first + d] if n == out.shape[first + d] else () for d, n in enumerate(bias.shape)]
    want = bias.with_layout(dims, out.pending)
    if set(bias.pending) == set(out.pending):
        if all(long[: len(short)] == short for long, short in zip(dims, bias.dims, strict=True)):
            return want
        raise Refusal("what is added to the product is cut otherwise than the product", [(bias, want.layout)])
    if not out.pending:
        raise Refusal("what is added to the product is a sum that is due", [(bias, want.layout)])
    raise Refusal(
        f"the product is pending over {', '.join(out.pending)}, and every rank would add the whole bias",
        [(bias, want.layout)],
        "Add it after the sum, as in F.linear(x, w).redistribute(...) + bias, or let it count on index 0 only:",
    )


@rule("addmm baddbmm")
def addmm(func: Any, bias: Spec, a: Spec, b: Spec, *, beta: float = 1, alpha: float = 1) -> OpPlan:
    """``beta * bias + alpha * a @ b``."""
    finite((beta, alpha), (bias, a, b))
    batch = ["b"] if len(a.shape) == 3 else []
    out, after = contract([(a, [*batch, "m", "k"]), (b, [*batch, "k", "n"])], [*batch, "m", "n"])
    return OpPlan(out, on_slices(func, [bias, a, b], [_summand(bias, out), *after]))


@rule("outer ger")
def outer(func: Any, a: Spec, b: Spec) -> OpPlan:
    """``a[:, None] * b``."""
    return _product(func, [(a, ["m"]), (b, ["n"])], ["m", "n"])


@rule("einsum")
def einsum(func: Any, equation: str, *operands: Any) -> OpPlan:
    """Products written in letters, without an ellipsis and without a diagonal."""
    factors: list[Spec] = list(operands[0]) if operands and isinstance(operands[0], tuple) else list(operands)
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    words = left.split(",")
    if "." in text or any(len(set(w)) < len(w) for w in words) or len(words) != len(factors):
        raise Refusal(f"its rule knows no ellipsis and no letter twice in one operand, as in {equation!r}")
    if not arrow:
        out = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    result, after = contract([(s, list(w)) for s, w in zip(factors, words, strict=True)], out)
    plain = on_plain(lambda *tensors: func(equation, *tensors))
    run = on_slices(plain, factors, after)
    return OpPlan(result, lambda equation, *t: run(*(t[0] if isinstance(t[0], list | tuple) else t)))
