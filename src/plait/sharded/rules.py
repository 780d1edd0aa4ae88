"""The table of rules: for a torch function, the layout of its result from the layouts of its operands.

A rule sees ``Spec``s where the call has tensors and answers with the spec of the result, or with a ``OpPlan`` if the
local pieces need another computation than the function itself; or it raises ``Refusal``.  It never communicates,
and it keeps one invariant, the *dual table*, by which the backward of an operator never communicates either:

    value on an axis       its gradient on that axis
    Shard                  Shard          my piece of the gradient
    Replicate              Partial(sum)   each rank's gradient is its own share of a sum
    Partial(sum)           Replicate      the gradient of every share is the gradient of the sum

Local autograd of the local computation must give exactly that.  ``y = x * w`` with x cut and w replicated: dw is
the sum over the local rows only, a share, as the table wants.  ``y = relu(x)`` with x pending: refused, because
the relu of a sum is no sum of relus.

A replicated operand may meet a cut one: it is sliced, which sends nothing, and its gradient, zero outside the
slice, is again its share.
"""

import cmath
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from plait.sharded.spec import OpPlan, Refusal, Spec
from plait.table.layout import Layout

Axes = tuple[str, ...]
Rule = Callable[..., Spec | OpPlan]
SomeRule = TypeVar("SomeRule", bound=Rule)
Cut = tuple[tuple[int, int, int], ...]
"""What to take of a local tensor: (dim, first, length) each."""

RULES: dict[Any, Rule] = {}
"""torch function -> rule; filled at import by the files beside this one, and by ``rule`` in yours."""


def named(*names: str) -> list[Any]:
    """The torch functions of these names: ``torch.x``, ``Tensor.x``, ``F.x``, as far as they exist."""
    functions = [getattr(module, name, None) for name in names for module in (torch, Tensor, F)]
    return [f for f in functions if callable(f)]


def rule(*functions: Any) -> Callable[[SomeRule], SomeRule]:
    """Enters a function in the table, under torch functions or all functions of a name.

    The rule is called with the torch function and then its arguments, specs in the place of tensors.
    """

    def enter(decide: SomeRule) -> SomeRule:
        for function in functions:
            for f in named(*function.split()) if isinstance(function, str) else (function,):
                RULES[f] = decide
        return decide

    return enter


def cut_of(before: Spec, after: Spec) -> Cut:
    """The slices that lead from a local piece to the smaller one of ``after``."""
    boxes = zip(before.start, after.start, before.local_shape, after.local_shape, strict=True)
    return tuple((d, b - a, n) for d, (a, b, m, n) in enumerate(boxes) if m != n)


def sliced(tensor: Tensor, cut: Cut) -> Tensor:
    """A local tensor after its cut."""
    for dim, first, length in cut:
        # first lies outside where the rank holds nothing of the dim
        tensor = tensor.narrow(dim, min(first, tensor.size(dim) - length), length)
    return tensor


def unsummed(*specs: Spec, why: str = "only a linear operator may act on a sum that is due") -> None:
    """Refuses operands with a pending sum."""
    due = [s for s in specs if s.pending]
    if due:
        raise Refusal(why, [(s, Layout(s.dims)) for s in due])


def finite(numbers: Iterable[Any], operands: Iterable[Spec]) -> None:
    """Refuses a pending sum that is to be multiplied by infinity, or by what is not a number."""
    if not all(cmath.isfinite(n) for n in numbers if isinstance(n, int | float | complex)):
        unsummed(*operands, why="of shares times infinity the sum is not a number")


def lossless(operands: Iterable[Spec], out: Spec) -> None:
    """Refuses a pending sum whose shares were rounded to whole or shorter numbers."""
    due = [s for s in operands if s.pending and torch.promote_types(s.dtype, out.dtype) != out.dtype]
    if out.pending and due:
        why = f"rounding each share to {out.dtype} is not rounding the sum"
        raise Refusal(why, [(s, Layout(s.dims)) for s in due])


def whole(spec: Spec, dims: Iterable[int], why: str) -> None:
    """Refuses a spec that is cut in one of these dims."""
    dims = [d % len(spec.dims) for d in dims if spec.dims]
    if any(spec.dims[d] for d in dims):
        free = tuple(() if d in dims else axes for d, axes in enumerate(spec.dims))
        raise Refusal(why, [(spec, Layout(free, spec.pending))])


def counted_once(spec: Spec, axes: Iterable[str]) -> Layout:
    """Where a summand belongs that meets a sum pending over these axes: at index 0, with zeros elsewhere."""
    return Layout(tuple(tuple(a for a in cut if a not in axes) for cut in spec.dims), tuple(axes))


def align(
    operands: Sequence[tuple[Spec, Sequence[str | None]]], grouped: str = ""
) -> tuple[dict[str, Axes], list[Spec]]:
    """The cut of every letter, and the operands sliced to it.

    Each operand has a letter per dim (None where a dim of size 1 is stretched).  A letter is cut as its most finely
    cut operand; the others must be replicated where they are not cut alike.  Dims of the ``grouped`` letter may have
    different sizes.
    """
    cuts: dict[str, Axes] = {}
    sizes: dict[str, int] = {}
    for spec, letters in operands:
        for axes, size, letter in zip(spec.dims, spec.shape, letters, strict=True):
            if letter is None:
                if axes:
                    raise _conflict(operands, "a dim of size 1 that is stretched must be whole")
                continue
            if sizes.setdefault(letter, size) != size and letter != grouped:
                raise Refusal(f"sizes {sizes[letter]} and {size} do not match")
            old = cuts.get(letter, ())
            long, short = (axes, old) if len(axes) > len(old) else (old, axes)
            if long[: len(short)] != short:
                raise _conflict(operands, f"one dim is cut over {'/'.join(old)} and over {'/'.join(axes)}")
            cuts[letter] = long
    used = [a for axes in cuts.values() for a in axes]
    for axis in used:
        if used.count(axis) > 1:
            raise _conflict(operands, f"two dims are cut over {axis}")
        if any(axis in spec.pending for spec, _ in operands):
            raise _conflict(operands, f"one operand is cut over {axis}, another has a sum over it pending")
    return cuts, [spec.with_layout([cuts[n] if n else () for n in letters], spec.pending) for spec, letters in operands]


def _conflict(operands: Sequence[tuple[Spec, Sequence[str | None]]], why: str) -> Refusal:
    """The way out of a conflict: the largest operand stays, the others follow it."""
    lead, lead_letters = max(operands, key=lambda o: o[0].shape.numel())
    want = {n: axes for n, axes in zip(lead_letters, lead.dims, strict=True) if n}
    taken = {*lead.pending, *(a for axes in want.values() for a in axes)}
    fix = []
    for spec, letters in operands:
        if spec is lead:
            continue
        dims: list[Axes] = []
        for n, axes in zip(letters, spec.dims, strict=True):
            if n and n not in want:
                want[n] = () if taken & set(axes) else axes
                taken |= set(want[n])
            dims.append(want[n] if n else ())
        fix.append((spec, Layout(tuple(dims), tuple(a for a in spec.pending if a not in taken))))
    if not any(layout != spec.layout for spec, layout in fix):  # an operand that is at odds with itself
        fix = [(spec, Layout.replicated(len(spec.dims))) for spec, _ in operands]
    return Refusal(why, fix)


def broadcast(specs: Sequence[Spec]) -> tuple[tuple[int, ...], list[tuple[Spec, list[str | None]]]]:
    """The shape that operands have together, and their letters for ``align``: dim d of the result is ``str(d)``."""
    num_dims = max(len(s.shape) for s in specs)
    padded = [(1,) * (num_dims - len(s.shape)) + tuple(s.shape) for s in specs]
    shape = tuple(next((n for n in column if n != 1), 1) for column in zip(*padded, strict=True))
    operands: list[tuple[Spec, list[str | None]]] = []
    for spec in specs:
        first = num_dims - len(spec.shape)
        letters = [str(first + d) if n == shape[first + d] else None for d, n in enumerate(spec.shape)]
        if any(n is None and size != 1 for n, size in zip(letters, spec.shape, strict=True)):
            raise Refusal(f"shapes {' and '.join(str(list(s.shape)) for s in specs)} do not broadcast")
        operands.append((spec, letters))
    return shape, operands


def combine(operands: Sequence[Spec], pending: Iterable[str] = ()) -> tuple[Spec, list[Spec]]:
    """The spec of what operands have together by broadcasting, and the operands sliced to its cut."""
    shape, letters = broadcast(operands)
    cuts, after = align(letters)
    return operands[0].new(shape, [cuts.get(str(d), ()) for d in range(len(shape))], tuple(pending)), after


def on_meta(func: Any, *args: Any, **options: Any) -> Any:
    """What a function makes of whole tensors, without values; raises Refusal where torch refuses the arguments."""
    try:
        return func(*map(_meta, args), **{k: _meta(v) for k, v in options.items()})
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise Refusal(f"torch refuses it ({str(error).partition(chr(10))[0]})") from None


def _meta(value: Any) -> Any:
    if isinstance(value, Spec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tuple(map(_meta, value)) if isinstance(value, tuple) else value


def dims_of_result(func: Any, x: Spec, *args: Any, **options: Any) -> list[int]:
    """For each dim of the result the dim of ``x`` that it is, -1 where it is a new one, or one that was reduced.

    The function is asked what it makes of dims of the sizes 2, 3, 4 ...
    """
    out = on_meta(
        func, torch.empty([2 + d for d in range(len(x.shape))], dtype=x.dtype, device="meta"), *args, **options
    )
    return [max(size - 2, -1) for size in (out if isinstance(out, Tensor) else out[0]).shape]


def rearranged(x: Spec, order: Sequence[int], pending: Sequence[str]) -> Spec:
    """The spec whose dim d is the dim ``order[d]`` of x, or where that is -1 one of size 1."""
    return x.new([1 if d < 0 else x.shape[d] for d in order], [() if d < 0 else x.dims[d] for d in order], pending)


def specs_in(args: Iterable[Any]) -> list[Spec]:
    """The operands among arguments, in order; lists are looked into."""
    specs: list[Spec] = []
    for a in args:
        specs += [a] if isinstance(a, Spec) else specs_in(a) if isinstance(a, tuple) else []
    return specs


def on_slices(function: Callable[..., Any], before: Sequence[Spec], after: Sequence[Spec]) -> Callable[..., Any]:
    """The function on operands sliced from ``before`` to ``after``, in the order of the call, those by keyword last."""
    if all(a is b for a, b in zip(before, after, strict=True)):
        return function
    cuts = [cut_of(b, a) for b, a in zip(before, after, strict=True)]

    def run(*args: Any, **kwargs: Any) -> Any:
        left = iter(cuts)
        args = tuple(sliced(a, next(left)) if isinstance(a, Tensor) else a for a in args)
        return function(*args, **{k: sliced(a, next(left)) if isinstance(a, Tensor) else a for k, a in kwargs.items()})

    return run


def on_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the pieces as plain tensors, for what is written in Python and reads sizes of its operands."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda t: t.as_subclass(Tensor), (args, kwargs))
        return function(*args, **kwargs)

    return run
