"""Splits an operator without its own rule into the torch operators that it is made of.

    torch.hstack([x, y])            hstack -> cat                       the rule of cat decides
    x[0] = y                        __setitem__ -> select, copy_        on the local piece
    torch.linalg.pinv(x)            pinv -> svd, where, matmul ...      a part without a rule needs whole operands

The call runs once on ``meta`` tensors of the global shapes, and the operators that torch calls underneath are noted.
Their rules give the layouts from step to step; the steps then run on the local pieces.  Calls that torch cannot trace
without values (the number of elements in a mask, say) run unchanged, on operands that every rank has whole.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from plait.sharded.dispatch import (
    LayoutError,
    by_rule,
    fits,
    freeze,
    gradients,
    mapped,
    rule_of,
    spec_of,
    tensors_in,
    writes,
)
from plait.sharded.layout import Layout
from plait.sharded.rules import OpOverload, OpOverloadPacket, lossless, name_of, specs_in
from plait.sharded.spec import OpPlan, Refusal, Spec, SpecCache
from plait.torch_private import TorchDispatchMode

RANDOM = torch.Tag.nondeterministic_seeded
OTHER_SHAPE = torch.Tag.inplace_view
PUBLIC = (FunctionType, OpOverload, OpOverloadPacket)
"""Kinds of functions that may be split though their names begin with an underscore, like that of ``F.threshold``."""

INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
META = torch.device("meta")


Call = tuple[Any, Any, Any, Any]
"""(operator, args, kwargs, results)"""


@dataclass(frozen=True)
class Place:
    """The place of a tensor among those of a call: its operands first, then the results of the steps.

    ``dense``: torch expects its memory to be row by row, as on meta.
    """

    number: int
    dense: bool = False

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the tensor at this place."""
        tensor = tensors[self.number]
        return tensor.contiguous() if self.dense else tensor


class LocalStep(NamedTuple):
    """One operator on local pieces, with places instead of tensors."""

    run: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Any


class Trace(NamedTuple):
    """The calls underneath a function of whole tensors, on ``meta`` tensors.

    ``constants`` are tensors with values that the function itself makes, for example from a list of indices.
    """

    operands: list[Tensor]
    constants: list[Tensor]
    calls: list[Call]
    result: Any


class _Watched(TorchDispatchMode):
    """Lets torch's operators pass if their results are known from the operands' values."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.operands = operands

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        knowable(op, args, self.operands)
        return self.passed(op, args, kwargs or {})

    def passed(self, op: Any, args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)


class _Noted(_Watched):
    """Notes the operators that torch calls, down to those that have a rule."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__(operands)
        self.calls: list[Call] = []

    def passed(self, op: Any, args: Any, kwargs: Any) -> Any:
        if by_memory(op):
            raise ValueError("its results from its own tensors can be computed, but not noted")
        mark = len(self.calls)
        out = NotImplemented
        if rule_of(op) is None:
            with self:
                out = taken_apart(op, args, kwargs)
            if any(call[0].namespace != "aten" for call in self.calls[mark:]):  # primitives have no gradient
                out = NotImplemented
        if out is NotImplemented:
            del self.calls[mark:]
            out = op(*args, **kwargs)
            self.calls.append((op, args, kwargs, out))
        return out


def taken_apart(op: Any, args: Any, kwargs: Any) -> Any:
    """Splits an operator as far as PyTorch can; an in-place one becomes the function and a copy."""
    name, schema = op._schema.name.partition("::")[2], op._schema
    if not schema.is_mutable:
        parts = decomposition_table.get(op)
        return NotImplemented if parts is None else parts(*args, **kwargs)
    functional = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), op._overloadname, None)
    if any(a.is_out for a in schema.arguments):
        raise Refusal(f"its part {name} writes into a tensor that it is given")
    if functional is None or functional._schema.is_mutable:
        return NotImplemented
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)}
    first = schema.arguments[0].name
    old = given[first]
    given[first] = old.clone()  # the gradient may need it after the tensor itself has changed
    new = functional(**given, **kwargs)
    fits(op, new.dtype, old.dtype)
    return old.copy_(new)


def by_memory(op: Any) -> bool:
    """True if an operator reads the strides of its tensor, or changes its shape in place."""
    return OTHER_SHAPE in op.tags or "as_strided" in op._schema.name


def knowable(op: Any, args: Sequence[Any], operands: Sequence[Tensor]) -> None:
    """Refuses an operator whose result does not follow from its operands' values alone."""
    if RANDOM in op.tags:
        raise Refusal(
            "it draws random numbers, and each rank would draw its own",
            hint="Draw them for the whole tensor and cut it (from_full); dropout: inside `with dropout_stream(seed):`.",
        )
    if by_memory(op) and any(args[0] is t for t in operands):
        raise Refusal(
            "it changes the shape of its tensor in place, or depends on its strides in memory",
            hint="Use a function that gives a new tensor: view, permute, narrow.",
        )


def decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], refusal: Refusal) -> tuple[OpPlan, bool]:
    """Returns the plan of a call by its parts; True if the only part is the function itself, for any number types.

    Args:
        refusal: the operator's own, used if its parts have no better one.

    Raises:
        Refusal: a part would have to communicate, draws random numbers, or needs values of cut operands.
    """
    name = getattr(func, "__name__", "")
    private = name.startswith("_") and not name.endswith("__") and not isinstance(func, PUBLIC)
    if name in ("__set__", "__delete__") or private:
        raise refusal
    given = list(tensors_in([args, kwargs]))
    cache = next(s.cache for s in map(spec_of, given) if s is not None)
    specs = [spec_of(t) or cache.replicated(t) for t in given]
    try:
        trace = traced(func, args, kwargs, specs)
    except Refusal:
        raise
    except Exception:  # torch asks for values, or refuses the call, and will do so again on whole operands
        trace = None
    if trace is None:
        return as_it_stands(func, specs, refusal), False
    if not trace.calls and writes(func, args, kwargs):  # it changes its tensor by other means, like apply_
        raise refusal
    try:
        return program(func, trace, specs, cache)
    except Refusal as part:
        if part.fix and all(s in specs for s in part.fix):
            raise
        whole = [(s, Layout.replicated(len(s.dims))) for s in specs]
        raise Refusal(part.why, whole, "" if any(not s.whole for s in specs) else part.hint) from None


def traced(func: Any, args: Any, kwargs: Any, specs: list[Spec]) -> Trace | None:
    """Traces the function on ``meta`` tensors of the specs; None if it does anything but call torch's operators."""
    flags = gradients(args, kwargs)
    metas = [
        torch.empty(s.shape, dtype=s.dtype, device=META, requires_grad=flag).clone()  # no leaf: it may change in place
        for s, flag in zip(specs, flags, strict=True)
    ]
    left = iter(metas)
    args, kwargs = mapped(lambda _: next(left), (args, kwargs))
    if func in INDEXING:  # torch would make a list a tensor on meta, which forgets the numbers
        args = (args[0], mapped(torch.tensor, args[1] if type(args[1]) is tuple else (args[1],), list), *args[2:])
    with _Noted(metas) as noted:
        result = func(*args, **kwargs)
    if any(t.shape != s.shape for t, s in zip(metas, specs, strict=True)):
        raise Refusal("it changes the shape of its tensor in place", hint="Use the function that gives a new tensor.")
    return used(metas, noted.calls, result)


def used(operands: list[Tensor], noted: list[Call], result: Any) -> Trace | None:
    """Returns the calls that change something, or whose results are used; None if these are not everything.

    Torch detaches some results only for a later backward.
    """
    known = {id(t) for t in operands} | {id(t) for call in noted for t in tensors_in([call[-1]])}
    needed = {id(t) for t in tensors_in([result])}
    calls: list[Call] = []
    constants: dict[int, Tensor] = {}
    for op, args, kwargs, made in reversed(noted):
        if op._schema.is_mutable or any(id(t) in needed for t in tensors_in([made])):
            calls.insert(0, (op, args, kwargs, made))
            needed |= {id(t) for t in tensors_in([args, kwargs])}
            new = {id(t): t for t in tensors_in([args, kwargs]) if id(t) not in known}
            if any(t.device == META for t in new.values()) or (new and op._schema.is_mutable):
                return None
            constants |= new
    ends = list(tensors_in([result]))
    told = all(id(t) in known or id(t) in constants for t in ends)
    if not told or not (ends or (result is None and calls)):
        return None
    return Trace(operands, list(constants.values()), calls, result)


def as_it_stands(func: Any, specs: list[Spec], refusal: Refusal) -> OpPlan:
    """Runs the function itself if every rank has all operands, so that its results are whole."""
    name = str(getattr(func, "__name__", ""))
    method = getattr(Tensor, name, None) is func
    if name == "__get__" or (method and not hasattr(operator, name) and not hasattr(torch.ops.aten, name)):
        raise refusal  # not a function of values: hooks, storage, names
    if not all(s.whole for s in specs):
        raise Refusal(
            f"{refusal.why}, so it needs whole operands", [(s, Layout.replicated(len(s.dims))) for s in specs]
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        given = list(tensors_in([args, kwargs]))
        pieces = [t.as_subclass(Tensor) for t in given]
        left = iter(pieces)
        args, kwargs = mapped(lambda _: next(left), (args, kwargs))
        try:
            with _Watched(pieces):
                out = func(*args, **kwargs)
        except Refusal as found:
            raise LayoutError(f"{name} of {' and '.join(map(repr, specs))}: {found.why}. {found.advice()}") from None
        if any(t.layout is not torch.strided for t in tensors_in([out])):
            raise LayoutError(f"{name}: a ShardedTensor is dense, and this result is not. Use .full()")
        if any(p.size() != s.local_shape for p, s in zip(pieces, specs, strict=True)):
            raise LayoutError(
                f"{name}: it changes the shape of its tensor in place, use the one that gives a new tensor"
            )
        own = {id(piece): t for piece, t in zip(pieces, given, strict=True)}
        return mapped(lambda t: own.get(id(t), t), out)

    return OpPlan(specs[0].cache, run)


def program(func: Any, trace: Trace, operands: list[Spec], cache: SpecCache) -> tuple[OpPlan, bool]:
    """Returns the steps on local pieces, each as its rule decides; or one step, the function itself, and True."""
    specs = [*operands, *map(cache.replicated, trace.constants)]
    places = {id(t): Place(k) for k, t in enumerate((*trace.operands, *trace.constants))}
    in_place = any(op._schema.is_mutable for op, *_ in trace.calls)
    steps = []
    for op, args, kwargs, result in trace.calls:
        args, kwargs = mapped(lambda d: cache.comm.device if d == META else d, (args, kwargs), torch.device)
        frozen, options = freeze(mapped(lambda t: specs[places[id(t)].number], (args, kwargs)), cache)
        plan = part(op, frozen, options, result, cache, in_place)
        views = any(a.alias_info is not None for a in op._schema.arguments)
        taken = mapped(partial(_place, places, views), (args, kwargs))
        made, told = list(tensors_in([result])), specs_in((plan.out,))
        if len(made) != len(told):
            raise Refusal(f"its part {op} has {len(made)} results, by its rule {len(told)}")
        for tensor, spec in zip(made, told, strict=True):
            if tuple(tensor.shape) != tuple(spec.shape):
                raise Refusal(f"its part {op} makes {list(tensor.shape)}, by its rule {list(spec.shape)}")
            if id(tensor) not in places:
                spec = spec.of(tensor.dtype)
                lossless(specs_in((frozen, *options.values())), spec)
                places[id(tensor)] = Place(len(specs))
                specs.append(spec)
        steps.append(LocalStep(plan.run or op, taken[0], taken[1], mapped(lambda t: places[id(t)], result)))
    results = mapped(lambda t: places[id(t)], trace.result)
    out: list[Spec] = []
    mapped(lambda place: out.append(specs[place.number]), results, Place)
    if len(trace.calls) == 1 and steps[0].run is trace.calls[0][0] and not trace.constants:
        op, given, options, _ = trace.calls[0]
        same = list(map(id, tensors_in([given, options]))) == list(map(id, trace.operands))
        if same and name_of(op).strip("_") == name_of(func).strip("_") and trace.result is not None:
            return OpPlan(out[0] if isinstance(trace.result, Tensor) else tuple(out)), True
    return OpPlan(tuple(out), runner(trace.constants, steps, results)), False


def _place(places: dict[int, Place], views: bool, tensor: Tensor) -> Place:
    return Place(places[id(tensor)].number, not views and tensor.is_contiguous())


def part(op: Any, args: Any, kwargs: Any, result: Any, cache: SpecCache, in_place: bool) -> OpPlan:
    """Returns the plan of one operator by its rule; without a rule it needs whole operands.

    Args:
        in_place: something is changed in place, so a view must not be a copy.
    """
    known, given = rule_of(op), specs_in((args, *kwargs.values()))
    if known is not None:
        try:
            if in_place and known[0] is torch.reshape:
                known = Tensor.view, known[1]
            plan = by_rule(known[0], known[1], args, kwargs)
            return OpPlan(plan.out, plan.run or known[0])
        except Refusal:
            if not all(s.whole for s in given):
                raise
    if all(s.whole for s in given):
        return OpPlan(tuple(cache.replicated(t) for t in tensors_in([result])), op)
    name = op._schema.name.partition("::")[2]
    raise Refusal(f"its part {name} has no rule", [(s, Layout.replicated(len(s.dims))) for s in given])


def runner(constants: list[Tensor], steps: list[LocalStep], results: Any) -> Callable[..., Any]:
    """Runs the steps on the pieces of the operands."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = list(tensors_in([args, kwargs]))
        tensors = [*(t.as_subclass(Tensor) for t in given), *constants]
        at = partial(Place.of, tensors=tensors)
        for step in steps:
            args, kwargs = mapped(at, (step.args, step.kwargs), Place)
            new: list[Tensor] = list(tensors_in([step.run(*args, **kwargs)]))
            places: list[Place] = []
            mapped(places.append, step.results, Place)
            tensors += [t for place, t in zip(places, new, strict=True) if place.number >= len(tensors)]
        tensors[: len(given)] = given
        return mapped(at, results, Place)

    return run
