"""Rules of matrix products: letters in, letters out.

    matmul   [m k] [k n] -> [m n]        a cut over m or n stays; a cut over k leaves a sum pending
    linear   [.. k] [n k] -> [.. n]      "n/tensor k" computes columns, "n k/tensor" leaves a pending sum

A product is linear in each factor: one factor may be pending over an axis over which the other is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.tensor.rules import Axes, align, broadcast, on_plain, on_slices, rule, unsummed
from plait.tensor.spec import Plan, Refusal, Spec

Letters = Sequence[str | None]


def contract(
    operands: Sequence[tuple[Spec, Letters]], out: Sequence[str], shape: Sequence[int]
) -> tuple[Spec, list[Spec]]:
    """The spec of a product with these letters, and the factors sliced to a common cut."""
    specs = [s for s, _ in operands]
    due = [a for s in specs for a in s.pending]
    if len(set(due)) < len(due):
        unsummed(*specs, why="the product of two sums is not the sum of products")
    cuts, after = align(operands)
    summed: list[Axes] = [axes for letter, axes in cuts.items() if letter not in out]
    dims = [cuts.get(letter, ()) for letter in out]
    return specs[0].new(shape, dims, [*due, *(a for axes in summed for a in axes)]), after


def _product(func: Any, operands: Sequence[tuple[Spec, Letters]], out: Sequence[str], shape: Sequence[int]) -> Plan:
    result, after = contract(operands, out, shape)
    return Plan(result, on_slices(func, [s for s, _ in operands], after))


@rule("matmul mm bmm mv dot __matmul__ __rmatmul__")
def matmul(func: Any, a: Spec, b: Spec) -> Plan:
    """Vectors, matrices and batches of them, with broadcasting."""
    if getattr(func, "__name__", "") == "__rmatmul__":
        raise Refusal("write a @ b with tensors on both sides")
    if not a.shape or not b.shape:
        raise Refusal("a product of matrices needs at least one dim on each side")
    left: list[str | None] = ["m", "k"] if len(a.shape) > 1 else ["k"]
    right: list[str | None] = ["k", "n"] if len(b.shape) > 1 else ["k"]
    batch: tuple[int, ...] = ()
    outer: list[tuple[Spec, list[str | None]]] = [(a, []), (b, [])]
    if len(a.shape) > 2 or len(b.shape) > 2:
        first, second = _batch(a), _batch(b)
        batch, outer = broadcast([first, second])
    (_, a_outer), (_, b_outer) = outer
    out = (
        [str(d) for d in range(len(batch))] + (["m"] if len(a.shape) > 1 else []) + (["n"] if len(b.shape) > 1 else [])
    )
    shape = (*batch, *(a.shape[-2:-1] if len(a.shape) > 1 else ()), *(b.shape[-1:] if len(b.shape) > 1 else ()))
    return _product(func, [(a, a_outer + left), (b, b_outer + right)], out, shape)


def _batch(spec: Spec) -> Spec:
    """The batch dims alone, for broadcasting; a matrix has none."""
    n = max(0, len(spec.shape) - 2)
    return spec.new(spec.shape[:n], [()] * n)


@rule("linear")
def linear(func: Any, input: Spec, weight: Spec, bias: Spec | None = None) -> Spec | Plan:
    """``input @ weight.T + bias``; the bias may not meet a pending product, or every rank would add it."""
    batch = [str(d) for d in range(len(input.shape) - 1)]
    operands = [(input, [*batch, "k"]), (weight, ["n", "k"][-len(weight.shape) :] if len(weight.shape) == 2 else ["k"])]
    letters = [*batch, "n"] if len(weight.shape) == 2 else batch
    shape = (*input.shape[:-1], *weight.shape[:-1])
    out, after = contract(operands, letters, shape)
    if bias is None:
        return Plan(out, on_slices(func, [input, weight], after))
    return Plan(out, on_slices(func, [input, weight, bias], [*after, _summand(bias, out)]))


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
def addmm(func: Any, bias: Spec, a: Spec, b: Spec, *, beta: float = 1, alpha: float = 1) -> Plan:
    """``beta * bias + alpha * a @ b``."""
    batch = ["b"] if len(a.shape) == 3 else []
    letters = [*batch, "m", "n"]
    shape = (*a.shape[:-1], b.shape[-1])
    out, after = contract([(a, [*batch, "m", "k"]), (b, [*batch, "k", "n"])], letters, shape)
    return Plan(out, on_slices(func, [bias, a, b], [_summand(bias, out), *after]))


@rule("outer ger")
def outer(func: Any, a: Spec, b: Spec) -> Plan:
    """``a[:, None] * b``."""
    return _product(func, [(a, ["m"]), (b, ["n"])], ["m", "n"], (*a.shape, *b.shape))


@rule("einsum")
def einsum(func: Any, equation: str, *operands: Any) -> Plan:
    """Products written in letters, without an ellipsis and without a diagonal."""
    factors: list[Spec] = list(operands[0]) if operands and isinstance(operands[0], tuple) else list(operands)
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    words = left.split(",")
    if "." in text or any(len(set(w)) < len(w) for w in words) or len(words) != len(factors):
        raise Refusal(f"its rule knows no ellipsis and no letter twice in one operand, as in {equation!r}")
    if not arrow:
        out = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    size = {c: n for w, s in zip(words, factors, strict=True) for c, n in zip(w, s.shape, strict=True)}
    result, after = contract(
        [(s, list(w)) for s, w in zip(factors, words, strict=True)], list(out), [size[c] for c in out]
    )
    plain = on_plain(lambda *tensors: func(equation, *tensors))
    run = on_slices(plain, factors, after) or plain
    return Plan(result, lambda equation, *t: run(*(t[0] if isinstance(t[0], list | tuple) else t)))
