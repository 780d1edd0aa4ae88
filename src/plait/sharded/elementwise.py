"""Rules of operators that act on each element by itself, with broadcasting, and of calls that compute nothing.

    kind       may meet a pending sum where                         examples
    LINEAR     always: the operator commutes with the sum           neg, clone, to(float), x * 2, x / 2
    ADDITIVE   every tensor is pending over the same axes           add, sub, where
    PRODUCT    the other factor is replicated over these axes       mul, div by a number
    any other  never                                                relu, exp, pow, comparisons, x + 2

Operands are aligned like the letters of a product: a replicated operand is sliced to the other's cut.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from plait.sharded.layout import Layout
from plait.sharded.rules import Rule, combine, lossless, on_slices, rule, specs_in, unsummed
from plait.sharded.spec import OpPlan, Refusal, Spec

LINEAR = (
    "neg negative positive clone contiguous detach detach_ requires_grad_ alias real float double half bfloat16 cpu "
    "cuda to type_as zero_ zeros_like neg_ negative_"
)
FRESH = "ones_like full_like empty_like"
ADDITIVE = "add sub subtract add_ sub_ subtract_ __add__ __radd__ __iadd__ __sub__ __isub__ copy_"
PRODUCT = "mul multiply mul_ multiply_ __mul__ __rmul__ __imul__"
QUOTIENT = "div divide true_divide div_ divide_ __truediv__ __itruediv__ __div__"
ELEMENTWISE = (
    "abs_ absolute logsigmoid hardswish tanhshrink softsign fill_ bool int long short int8 uint8 floor_divide "
    "__invert__ __abs__ __rsub__ __pow__ __rpow__ __ipow__ __rdiv__ __rtruediv__ __mod__ __floordiv__ __rfloordiv__ "
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__"
)
"""Elementwise functions that torch does not tag as such; see ``elementwise``."""
AS_IT_IS = (
    "is_floating_point is_complex element_size get_device is_signed is_inference is_contiguous is_conj is_neg "
    "data_ptr storage_offset retain_grad _has_compatible_shallow_copy_type"
)
PROPERTIES = (
    "dtype device requires_grad is_leaf grad_fn layout is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "itemsize _version output_nr retains_grad is_mkldnn is_sparse_csr is_xla is_mps is_xpu _backward_hooks"
)
BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

SET_REQUIRES_GRAD: Any = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def elementwise(*ops: Any) -> Rule | None:
    """Returns the rule for operators of torch's library if torch itself tags one of them as elementwise."""
    for op in ops:
        drawn = any(a.name == "generator" for a in op._schema.arguments)
        if torch.Tag.pointwise in op.tags and not BY_VALUE & {*op.tags} and len(op._schema.returns) == 1 and not drawn:
            return any_elementwise
    return None


def _combined(func: Any, operands: list[Spec], pending: Iterable[str] = ()) -> Spec | OpPlan:
    """Applies the operator to operands sliced to a common cut; in place, it must keep its first operand's spec."""
    out, after = combine(operands, pending)
    name = str(getattr(func, "__name__", ""))
    in_place = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")
    if in_place and out is not operands[0]:
        fix = [(operands[0], out.layout)] if out.shape == operands[0].shape else []
        raise Refusal(f"in place it would turn the first operand into {out!r}", fix)
    if in_place:
        lossless(operands, out)
    return OpPlan(out, on_slices(func, operands, after))


def _tensors(args: Any, options: dict[str, Any]) -> list[Spec]:
    if specs_in(options.values()):
        raise Refusal("the rule takes tensors by position, not by keyword")
    return specs_in(args)


@rule(LINEAR, torch.ops.aten._to_copy)
def linear_elementwise(func: Any, x: Spec, *args: Any, **options: Any) -> Spec:
    """Keeps the layout."""
    return x


@rule(FRESH)
def fresh(func: Any, x: Spec, *args: Any, **options: Any) -> Spec:
    """Gives new values the cut of an old tensor, with nothing pending."""
    return x.with_layout(x.dims)


@rule("new_zeros new_ones new_empty new_full")
def new(func: Any, x: Spec, *sizes: Any, **options: Any) -> Spec:
    """Makes a replicated tensor of another shape."""
    shape = options.get("size", sizes[0] if sizes and isinstance(sizes[0], tuple) else sizes)
    return x.new(shape, [()] * len(shape))


@rule(ADDITIVE)
def additive(func: Any, *args: Any, **options: Any) -> Spec | OpPlan:
    """Requires all summands to be pending over the same axes, or none."""
    operands = _tensors(args, options)
    due = {a for s in operands for a in s.pending}
    given = (*args, options.get("other")) if not func.__name__.startswith("copy") else ()
    numbers = [a for a in given if isinstance(a, int | float | complex) and a != 0]
    share = next((s for s in operands if set(s.pending) != due), None)
    if due and (numbers or share):
        hint = ""
        if share and not numbers:
            once = Layout(tuple(tuple(a for a in cut if a not in due) for cut in share.dims), tuple(due))
            hint = f"Either call .redistribute('{once}') on the operand {share!r} (sends nothing: it counts on index 0 "
            hint += "only), or"
        what = "a number" if numbers else "a tensor without it"
        why = f"{what} added to a sum pending over {', '.join(sorted(due))} would be added once per rank"
        raise Refusal(why, [(s, Layout(s.dims)) for s in operands if s.pending], hint)
    return _combined(func, operands, due)


@rule(PRODUCT)
def product(func: Any, *args: Any, **options: Any) -> Spec | OpPlan:
    """Allows one factor to be pending over an axis, if the other is replicated over it."""
    operands = _tensors(args, options)
    due = [a for s in operands for a in s.pending]
    if len(set(due)) < len(due):
        unsummed(*operands, why="the product of two sums is not the sum of products")
    return _combined(func, operands, due)


@rule(QUOTIENT)
def quotient(func: Any, x: Any, y: Any, **options: Any) -> Spec | OpPlan:
    """Is linear in the dividend if the divisor is a number, and nothing is rounded."""
    operands = specs_in((x, y))
    if isinstance(y, Spec):
        unsummed(*operands, why="a share divided by 0 is infinite, and the sum of infinities is not a number")
    if options.get("rounding_mode"):
        unsummed(*operands, why="rounding is not linear")
    return product(func, x, y)


@rule(ELEMENTWISE)
def any_elementwise(func: Any, *args: Any, **options: Any) -> Spec | OpPlan:
    """Refuses pending operands."""
    operands = _tensors(args, options)
    unsummed(*operands)
    return _combined(func, operands)


@rule("where")
def where(func: Any, *args: Any) -> Spec | OpPlan:
    """Is linear in its two values, if both are pending over the same axes (0 is pending over anything)."""
    if len(args) != 3:
        raise Refusal("the form that returns indices has a result whose size depends on values")
    # Tensor.where(x, condition, y) has the values around the condition
    condition, x, y = (args[1], args[0], args[2]) if func is Tensor.where else args
    unsummed(condition, why="the condition must be known")
    numbers = [v for v in (x, y) if isinstance(v, int | float) and v != 0]
    values = specs_in((x, y))
    due = {a for s in values for a in s.pending}
    if due and (numbers or any(set(s.pending) != due for s in values)):
        unsummed(*values)
    return _combined(func, specs_in(args), due)


@rule("masked_fill masked_fill_")
def masked_fill(func: Any, x: Spec, mask: Spec, value: Any) -> Spec | OpPlan:
    """Is linear in the tensor if the value is 0."""
    unsummed(mask, *specs_in((value,)))
    if value != 0:
        unsummed(x)
    return _combined(func, specs_in((x, mask, value)), x.pending)


# ---- what is not a function of values -----------------------------------------------------------------------


@rule(AS_IT_IS, *(getattr(Tensor, name).__get__ for name in PROPERTIES.split()), SET_REQUIRES_GRAD)
def as_it_is(func: Any, *args: Any) -> OpPlan:
    """Answers questions that have the same answer for a piece and the whole, and ``x.requires_grad = True``."""
    return OpPlan(None)


@rule(Tensor.data.__get__)  # type: ignore[attr-defined]
def data(func: Any, x: Spec) -> Spec:
    """``x.data``: the same values outside autograd."""
    return x


@rule(Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(func: Any, x: Spec, value: Spec) -> OpPlan:
    """``x.data = y`` for the same layout; the dtype may differ."""
    if (value.shape, value.layout) != (x.shape, x.layout):
        raise Refusal("the new data must have the same shape and layout", [(value, x.layout)])

    def run(x: Any, value: Any) -> None:
        func(x, value)
        x._spec = x._spec.of(value.dtype)

    return OpPlan(None, run)


@rule("item tolist numpy __bool__ __float__ __int__ __index__ __array__ is_nonzero __format__")
def to_python(func: Any, x: Spec, *args: Any, **options: Any) -> OpPlan:
    """Turns a tensor into Python numbers where every rank has all of it."""
    if x.layout.cut or x.pending:
        raise Refusal("not every rank has all values", [(x, Layout.replicated(len(x.dims)))], "Take .full(), or")
    return OpPlan(None)
