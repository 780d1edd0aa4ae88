"""The table of rules: for a torch function, they derive the layout of its result from the layouts of its operands.

A rule sees ``Spec``s where the call has tensors.  It returns the spec of the result, or an ``OpPlan`` if the local
pieces need a computation other than the function itself, or it raises ``Refusal``.  It never communicates, and it keeps
one invariant, the *dual table*, by which the backward of an operator never communicates either:

    value on an axis       its gradient on that axis
    Shard                  Shard          my piece of the gradient
    Replicate              Partial(sum)   each rank's gradient is its own share of a sum
    Partial(sum)           Replicate      the gradient of every share is the gradient of the sum

Local autograd of the local computation must give exactly that.  ``y = x * w`` with x cut and w replicated: dw is the
sum over only the local rows, a share, as the table requires.  ``y = relu(x)`` with x pending: refused, because the relu
of a sum is not a sum of relus.

Most rules give each dim of the operands a *letter*, as einsum does: dims with the same letter are cut over the same
axes.  A replicated operand may meet a cut one: it is sliced, which sends nothing, and its gradient, zero outside of the
slice, is again its share.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.sharded.layout import Layout
from plait.sharded.spec import OpPlan, Refusal, Spec
from plait.tensor.metadata import name_of as name_of_function

Axes = tuple[str, ...]
Letters = Sequence[str | None]
"""A letter for each dim; None for a dim of size 1 that is stretched, or a whole dim of the result."""
Rule = Callable[..., Spec | OpPlan]
SomeRule = TypeVar("SomeRule", bound=Rule)

OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)
"""The classes of one form of an operator of torch's library, and of all its forms."""

RULES: dict[Any, Rule] = {}
"""Maps a torch function to its rule; the files of this package fill it at import, and ``rule`` adds yours."""


def named(*names: str) -> list[Any]:
    """Returns the torch functions with these names: ``torch.x``, ``Tensor.x`` and ``F.x``, if they exist."""
    functions = [getattr(module, name, None) for name in names for module in (torch, Tensor, F)]
    return [f for f in functions if callable(f)]


def parts(names: str) -> list[Any]:
    """Returns the operators of torch's library with these names, if they exist."""
    return [getattr(torch.ops.aten, n) for n in names.split() if hasattr(torch.ops.aten, n)]


def rule(*functions: Any) -> Callable[[SomeRule], SomeRule]:
    """Enters a function in the table, under torch functions or under all functions of a name.

    The rule is called with the torch function and then its arguments, with specs instead of tensors.
    """

    def enter(decide: SomeRule) -> SomeRule:
        for function in functions:
            for f in named(*function.split()) if isinstance(function, str) else (function,):
                RULES[f] = decide
        return decide

    return enter


def name_of(func: Any) -> str:
    """The name of a function in messages: ``matmul``, ``softmax``, ``T``."""
    return str(func._schema.name.partition("::")[2]) if hasattr(func, "_schema") else name_of_function(func)


# ---- what a rule refuses ------------------------------------------------------------------------------------


def unsummed(*specs: Spec | None, why: str = "only a linear operator may act on a sum that is due") -> None:
    """Refuses operands with a pending sum."""
    due = [s for s in specs if s is not None and s.pending]
    if due:
        raise Refusal(why, [(s, Layout(s.dims)) for s in due])


def lossless(operands: Iterable[Spec], out: Spec) -> None:
    """Refuses to round the shares of a pending sum to integers or shorter numbers."""
    due = [s for s in operands if s.pending and torch.promote_types(s.dtype, out.dtype) != out.dtype]
    if out.pending and due:
        why = f"rounding each share to {out.dtype} is not rounding the sum"
        raise Refusal(why, [(s, Layout(s.dims)) for s in due])


def whole(spec: Spec | None, dims: Iterable[int], why: str) -> None:
    """Refuses a spec that is cut in one of these dims."""
    dims = [d % len(spec.dims) for d in dims if spec.dims] if spec is not None else []
    if spec is not None and any(spec.dims[d] for d in dims):
        free = tuple(() if d in dims else axes for d, axes in enumerate(spec.dims))
        raise Refusal(why, [(spec, Layout(free, spec.pending))])


# ---- letters ------------------------------------------------------------------------------------------------


def align(operands: Sequence[tuple[Spec, Letters]], grouped: str = "") -> tuple[dict[str, Axes], list[Spec]]:
    """Returns the cut of every letter, and the operands sliced to it.

    A letter is cut like its most finely cut operand; the sizes of a letter are equal, except for ``grouped``.
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
    return cuts, [spec.with_layout(cut_as(letters, cuts), spec.pending) for spec, letters in operands]


def cut_as(letters: Letters, cuts: dict[str, Axes]) -> list[Axes]:
    """Returns the axes of dims with these letters."""
    return [cuts.get(n or "", ()) for n in letters]


def _conflict(operands: Sequence[tuple[Spec, Letters]], why: str) -> Refusal:
    """Returns the way out of a conflict: the largest operand stays, the others follow it."""
    lead, lead_letters = max(operands, key=lambda o: o[0].shape.numel())
    want = {n: axes for n, axes in zip(lead_letters, lead.dims, strict=True) if n}
    taken = {*lead.pending, *(a for axes in want.values() for a in axes)}
    fix = []
    for spec, letters in operands:
        if spec is lead:
            continue
        for n, axes in zip(letters, spec.dims, strict=True):
            if n and n not in want:
                want[n] = () if taken & set(axes) else axes
                taken |= set(want[n])
        fix.append((spec, Layout(tuple(cut_as(letters, want)), tuple(a for a in spec.pending if a not in taken))))
    if not any(layout != spec.layout for spec, layout in fix):  # an operand that is at odds with itself
        fix = [(spec, Layout.replicated(len(spec.dims))) for spec, _ in operands]
    return Refusal(why, fix)


def broadcast(specs: Sequence[Spec], inner: Sequence[int] = ()) -> tuple[tuple[int, ...], list[list[str | None]]]:
    """Returns the operands' common shape, and the letters of each: dim d of the result is ``str(d)``.

    The last ``inner`` dims of each operand are left out.
    """
    shapes = [tuple(s.shape)[: len(s.shape) - n] for s, n in zip(specs, inner or [0] * len(specs), strict=True)]
    num_dims = max(map(len, shapes))
    columns = zip(*((1,) * (num_dims - len(s)) + s for s in shapes), strict=True)
    shape = tuple(next((n for n in column if n != 1), 1) for column in columns)
    every: list[list[str | None]] = []
    for own in shapes:
        first = num_dims - len(own)
        letters = [str(first + d) if n == shape[first + d] else None for d, n in enumerate(own)]
        if any(n is None and size != 1 for n, size in zip(letters, own, strict=True)):
            raise Refusal(f"shapes {' and '.join(str(list(s.shape)) for s in specs)} do not broadcast")
        every.append(letters)
    return shape, every


def combine(operands: Sequence[Spec], pending: Iterable[str] = ()) -> tuple[Spec, list[Spec]]:
    """Returns the operands' common spec by broadcasting, and the operands sliced to its cut."""
    shape, letters = broadcast(operands)
    cuts, after = align(list(zip(operands, letters, strict=True)))
    return operands[0].new(shape, cut_as([str(d) for d in range(len(shape))], cuts), tuple(pending)), after


def contract(operands: Sequence[tuple[Spec, Letters]], out: Sequence[str]) -> tuple[Spec, list[Spec]]:
    """Returns the spec of a product with these letters, and the factors sliced to a common cut.

    A product is linear in each factor: one may be pending over an axis over which the others are replicated.
    """
    specs = [s for s, _ in operands]
    due = [a for s in specs for a in s.pending]
    if len(set(due)) < len(due):
        unsummed(*specs, why="the product of two sums is not the sum of products")
    cuts, after = align(operands)
    summed = [a for letter, axes in cuts.items() if letter not in out for a in axes]
    size = {c: n for s, letters in operands for c, n in zip(letters, s.shape, strict=True)}
    return specs[0].new([size[c] for c in out], cut_as(out, cuts), [*due, *summed]), after


def by_letters(
    op: Any, operands: Sequence[tuple[Spec, Letters]], results: Sequence[tuple[Tensor, Letters]],
    along: Iterable[str | None] = (), pending: Sequence[str] = (), why: str = "",
) -> OpPlan:  # fmt: skip
    """The plan of an operator that treats all dims except the letters ``along`` as batches, which may be cut.

    Args:
        results: its results from whole tensors, on meta, and their letters.
        pending: the axes over which the results are pending.
    """
    along = {*along} - {None}
    for spec, letters in operands:
        dims = [d for d, letter in enumerate(letters) if letter in along]
        whole(spec, dims, why or f"{name_of(op)} needs the dims that it works along whole on each rank")
    cuts, after = align(operands)
    x, before = operands[0][0], [s for s, _ in operands]
    out = tuple(
        x.cache.spec(Layout(tuple(cut_as(letters, cuts)), tuple(pending)), t.shape, t.dtype) for t, letters in results
    )
    nothing = any(s.shape.numel() and not s.local_shape.numel() for s in after)  # this rank has nothing of an operand
    return OpPlan(out, zeros_of(out) if nothing else on_slices(op, before, after))


# ---- functions on pieces ------------------------------------------------------------------------------------


def zeros_of(out: Sequence[Spec]) -> Callable[..., list[Any]]:
    """Makes zeros that still depend on all operands."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        nothing = [t.flatten()[:0].sum() for t in given if t.requires_grad]
        zeros = [given[0].new_zeros(s.local_shape, dtype=s.dtype) for s in out]
        numbers = [z.is_floating_point() or z.is_complex() for z in zeros]
        return [
            z + sum(n.to(z.dtype) for n in nothing) if number else z for z, number in zip(zeros, numbers, strict=True)
        ]

    return run


def on_slices(function: Callable[..., Any], before: Sequence[Spec], after: Sequence[Spec]) -> Callable[..., Any]:
    """Slices operands from ``before`` to ``after`` for a function, in the order of the call, those by keyword last."""
    if all(a is b for a, b in zip(before, after, strict=True)):
        return function

    cuts = []  # for each operand (dim, first, length); an empty piece begins outside of the operand
    for b, a in zip(before, after, strict=True):
        boxes = zip(b.start, a.start, b.local_shape, a.local_shape, strict=True)
        cuts.append([(d, min(new - old, m - n), n) for d, (old, new, m, n) in enumerate(boxes) if m != n])

    def run(*args: Any, **kwargs: Any) -> Any:
        left = iter(cuts)

        def sliced(value: Any) -> Any:
            for cut in next(left) if isinstance(value, Tensor) else ():
                value = value.narrow(*cut)
            return value

        args = tuple(map(sliced, args))
        return function(*args, **{k: sliced(v) for k, v in kwargs.items()})

    return run


# ---- on meta ------------------------------------------------------------------------------------------------


def on_meta(func: Any, *args: Any, **options: Any) -> Any:
    """Calls a function on whole tensors without values; raises Refusal if torch refuses the arguments."""
    try:
        return func(*map(_meta, args), **{k: _meta(v) for k, v in options.items()})
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise Refusal(f"torch refuses it ({str(error).partition(chr(10))[0]})") from None


def _meta(value: Any) -> Any:
    if isinstance(value, Spec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tuple(map(_meta, value)) if isinstance(value, tuple) else value


def results_of(op: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Returns the tensors that an operator makes from whole ones, on meta."""
    out = on_meta(op, *args, **kwargs)
    return [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]


def dims_of_result(func: Any, x: Spec, *args: Any, **options: Any) -> list[int]:
    """For each dim of the result, the matching dim of ``x``; -1 for a new or reduced one.

    The function is tried on dims of the sizes 2, 3, 4 ...
    """
    probe = torch.empty([2 + d for d in range(len(x.shape))], dtype=x.dtype, device="meta")
    return [max(size - 2, -1) for size in results_of(func, probe, *args, **options)[0].shape]


def rearranged(x: Spec, order: Sequence[int], pending: Sequence[str]) -> Spec:
    """Returns the spec whose dim d is dim ``order[d]`` of x, or a dim of size 1 for -1."""
    return x.new([1 if d < 0 else x.shape[d] for d in order], [() if d < 0 else x.dims[d] for d in order], pending)


def specs_in(args: Iterable[Any]) -> list[Spec]:
    """Returns the operands among arguments, in order, also those inside lists."""
    specs: list[Spec] = []
    for a in args:
        specs += [a] if isinstance(a, Spec) else specs_in(a) if isinstance(a, tuple) else []
    return specs
