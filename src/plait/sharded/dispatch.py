"""Finds a call's rule and its decision: the slow path, taken once per function, layouts and arguments.

args  --freeze-->  specs and values  --rule-->  OpPlan     kept with the first operand's spec
                                      \\------>  Refusal -> LayoutError, which names operator, layouts, a way out

A call whose operator has no rule, or whose rule does not know its arguments, is split (``decompose.py``).
"""

import inspect
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.sharded.elementwise import elementwise
from plait.sharded.layout import Layout
from plait.sharded.rules import RULES, OpOverload, OpOverloadPacket, Rule, name_of, named, specs_in
from plait.sharded.spec import OpPlan, Refusal, Spec, SpecCache
from plait.torch_private import DisableTorchFunctionSubclass, is_functorch_wrapped_tensor, tree_leaves, tree_map

ATOMS = {
    int, float, bool, str, type(None), complex, type(...), torch.dtype, torch.device, torch.memory_format, torch.layout
}  # fmt: skip
"""Types of arguments that are themselves part of an ``OpPlan``'s key."""

DIRECT: dict[Any, Callable[..., Any]] = {}
"""Functions that handle ShardedTensors themselves, such as ``torch.autograd.grad``."""

MOST_KEPT = 4096
"""The most ``OpPlan``s kept per spec: an operator whose number changes with every call must not fill the memory."""

IN_TORCH_FUNC = (
    "a ShardedTensor meets torch.func (grad, vmap, ...), whose tensors cannot carry its layout: "
    "use torch.autograd.grad, and a batch dim instead of vmap"
)

ALSO = {"view": "reshape", "_unsafe_view": "reshape", "alias": "view_as"}
"""Operators of torch's library that use the rule of another function."""

BY_TYPE = {Tensor.__getitem__, *named("std", "var")}
"""Functions that treat 1 and True differently, although these are one key of a dict."""


class FrozenList(tuple[Any, ...]):
    """A list among frozen arguments: as an index its meaning differs from a tuple's."""

    __slots__ = ()


class LayoutError(ValueError):
    """An operator that would have to communicate, or has no rule; the message names the way out.

    ``fix`` has layouts of the operands that would work, if there are any.
    """

    def __init__(self, message: str, fix: dict[Spec, Layout] | None = None) -> None:
        super().__init__(message)
        self.fix = fix or {}


def spec_of(value: Any) -> Spec | None:
    """The spec of a ShardedTensor; None for anything else."""
    return getattr(value, "_spec", None) if isinstance(value, Tensor) else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of an argument, also those inside lists and dicts."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def mapped(change: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """Returns a value with its tensors changed, also those inside lists, tuples of any kind and dicts."""
    return tree_map(lambda v: change(v) if isinstance(v, kind) else v, value, is_leaf=lambda v: isinstance(v, kind))


def cache_of(func: Any, args: Any, kwargs: Any) -> SpecCache:
    """Returns the cache that all the operands' specs share.

    Raises:
        ValueError: the operands belong to two comms.
    """
    specs = [s for s in map(spec_of, tensors_in([args, kwargs])) if s is not None]
    for spec in specs:
        if spec.cache is not specs[0].cache:
            a, b = specs[0].comm.mesh, spec.comm.mesh
            raise ValueError(
                f"{name_of(func)} of tensors of two comms, on the meshes '{a}' and '{b}': an expression has only one"
            )
    return specs[0].cache


def freeze(value: Any, cache: SpecCache) -> Any:
    """Returns an argument with tensors replaced by specs, and lists and slices by tuples."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, Tensor):
        return spec_of(value) or plain_spec(value, cache)
    if isinstance(value, list | tuple):
        return (FrozenList if isinstance(value, list) else tuple)(freeze(v, cache) for v in value)
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        if any(isinstance(v, Tensor) for v in ends):
            raise LayoutError(f"a slice from tensor to tensor of a ShardedTensor: give numbers, {value} has tensors")
        return ("slice", *(freeze(v, cache) for v in ends))
    if isinstance(value, np.generic):  # a number like any other
        return value.item()
    if isinstance(value, numbers.Number | np.ndarray):
        raise LayoutError(f"a {type(value).__name__} meets ShardedTensors: give a number of Python, or a tensor")
    return value


def plain_spec(tensor: Tensor, cache: SpecCache) -> Spec:
    """Returns the spec of a plain tensor, which is assumed to be the same on every rank.

    Raises:
        LayoutError: it cannot be the same.
    """
    if is_functorch_wrapped_tensor(tensor):
        raise LayoutError(IN_TORCH_FUNC)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise LayoutError(
            f"a plain tensor {list(tensor.shape)} that requires a gradient meets ShardedTensors: its gradient would "
            f"be this rank's share only; make it ShardedTensor.from_full(tensor, layout, comm)"
        )
    if tensor.layout is not torch.strided:
        raise LayoutError(f"a plain tensor of layout {tensor.layout} meets ShardedTensors: .to_dense() it")
    return cache.replicated(tensor)


def types_of(frozen: Any) -> Any:
    """The types of an argument's atoms: 1, 1.0 and True are the same key in a dict."""
    return (type(frozen), *map(types_of, frozen)) if isinstance(frozen, tuple) else type(frozen)


def gradients(args: Any, kwargs: Any) -> tuple[bool, ...]:
    """For each tensor of a call, True if it requires a gradient."""
    with DisableTorchFunctionSubclass():
        return tuple(t.requires_grad for t in tensors_in([args, kwargs]))


def decision(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OpPlan, Callable[[], None] | None]:
    """Returns the plan of a call and, if it is new, a function that keeps it for the next call of its kind.

    Raises:
        LayoutError: the rule refuses, or there is none.
    """
    cache = cache_of(func, args, kwargs)
    frozen = tuple(freeze(a, cache) for a in args)
    options = {k: freeze(v, cache) for k, v in kwargs.items()}
    operands = specs_in((frozen, *options.values()))
    key: Any = (func, *frozen, *options.items())
    types = types_of((*frozen, *options.values()))
    exact: Any = ("exactly", key, types, torch.is_grad_enabled(), gradients(args, kwargs))
    kept = operands[0].op_plans
    try:
        known = kept.get(exact)
    except TypeError:  # an argument that cannot be looked up
        known, exact = None, None
    if known is not None:
        return known, None
    try:
        plan, general = decide(func, args, kwargs, frozen, options)
    except Refusal as refusal:
        raise refused(func, operands, refusal) from None
    run = plan.run or func
    if writes(func, args, kwargs):
        run = no_copy_written(func, run)
    plan = OpPlan(plan.out, run)

    def keep() -> None:
        if exact is not None:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            # a plan that depends on more than its numbers' values is only found under its exact key
            kept.update(dict.fromkeys((exact, key) if general else (exact,), plan))

    return plan, keep


def writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a function changes its first operand."""
    name = str(getattr(func, "__name__", ""))
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    try:
        return name.endswith("_") or bool(inspect.signature(func).bind(*args, **kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):  # torch's own functions have no signature
        return False


def no_copy_written(func: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Computes a call that changes its first operand, unless that is a copy where torch has a view."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else next(tensors_in(kwargs))
        if hasattr(x, "_copied_by"):
            raise LayoutError(
                f"{name_of(func)} would change a copy: {x._copied_by} gave it under auto_redistribute, where torch has "
                f"a view. Change the tensor itself, or redistribute it first"
            )
        return run(*args, **kwargs)

    return guarded


def refused(func: Any, operands: list[Spec], refusal: Refusal) -> LayoutError:
    """Returns the error that names the operator, the layouts and the way out."""
    text = f"{name_of(func)} of {' and '.join(map(repr, operands))}: {refusal.why}. {refusal.advice()}"
    return LayoutError(text.strip(), {s: to for s, to in refusal.fix.items() if s in operands})


def decide(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frozen: tuple[Any, ...], options: dict[str, Any]
) -> tuple[OpPlan, bool]:
    """Returns the plan by the rule, or by splitting the call; True if it holds for numbers of other types.

    Raises:
        Refusal: it would have to communicate, or no way is known.
    """
    from plait.sharded.decompose import decomposed  # it imports this file for the rules of the parts

    if specs_in((options.get("out"),)):
        out, given_out = options["out"], kwargs["out"]
        left = {k: v for k, v in options.items() if k != "out"}
        plan, general = decide(func, args, {k: v for k, v in kwargs.items() if k != "out"}, frozen, left)
        return into(plan, func, out if isinstance(given_out, list | tuple) else (out,)), general
    known = rule_of(func)
    try:
        if known is None:
            raise Refusal("it has no rule for sharded tensors", hint="Compute on .full() or .local, or enter a rule")
        return by_rule(func, known[1], frozen, options), func not in BY_TYPE
    except Refusal as refusal:
        if refusal.fix:  # a way out is better than splitting
            raise
        plan, general = decomposed(func, args, kwargs, refusal)
        return plan, general and func not in BY_TYPE


def rule_of(func: Any) -> tuple[Any, Rule] | None:
    """Returns a rule and the function that it takes for this one, which may be an operator of torch's library."""
    if func in RULES:
        return func, RULES[func]
    name = name_of(func)
    if isinstance(func, OpOverload):
        if func.overloadpacket in RULES:
            return func, RULES[func.overloadpacket]
        function = next((f for f in named(ALSO.get(name, name)) if f in RULES), None)
        if function is not None:
            return function, RULES[function]
        by_itself = None if func._schema.is_mutable else elementwise(func)
        return None if by_itself is None else (func.overloadpacket, by_itself)
    packet = getattr(torch.ops.aten, name, None) if func in named(name) else None
    if packet in RULES or not isinstance(packet, OpOverloadPacket):
        return None
    by_itself = elementwise(*(getattr(packet, overload) for overload in packet.overloads()))
    return None if by_itself is None else (func, by_itself)


def by_rule(func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """Calls the rule of a function with specs instead of tensors.

    Raises:
        Refusal: it does not know these arguments, or would have to communicate.
    """
    try:
        bound = inspect.signature(rule).bind(func, *args, **kwargs)
    except TypeError as error:
        raise Refusal(f"its rule does not know these arguments ({error})") from None
    if specs_in((bound.args, *bound.kwargs.values())) != specs_in((args, *kwargs.values())):
        raise Refusal("its tensors stand in an order other than that of its signature: give them by position")
    out = rule(func, *args, **kwargs)
    return OpPlan(out) if isinstance(out, Spec) else out


def into(plan: OpPlan, func: Any, outs: tuple[Spec, ...]) -> OpPlan:
    """The plan whose results go to ``out=``: tensors of their shapes, in their layouts."""
    if isinstance(plan.out, SpecCache):
        ways = [(s, Layout.replicated(len(s.dims))) for s in outs if not s.whole]
    else:
        results = plan.out if isinstance(plan.out, tuple) else (plan.out,)
        made = [r for r in results if r is not None]
        if [r.shape for r in made] != [s.shape for s in outs]:
            raise Refusal(f"out= must have the shape of the result: {made}, not {list(outs)}")
        ways = [(s, r.layout) for r, s in zip(made, outs, strict=True) if r.layout != s.layout]
    if ways:
        raise Refusal("out= and the result have different layouts", ways)
    each = plan.run or func

    def run(*args: Any, out: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in([args, kwargs, out])):
            raise RuntimeError(f"{name_of(func)}: torch has no gradients if a result goes to out=")
        for target, result in zip(tensors_in([out]), tensors_in([each(*args, **kwargs)]), strict=True):
            fits(func, result.dtype, target.dtype)
            target.as_subclass(Tensor).copy_(result.as_subclass(Tensor))
        return out

    return OpPlan(None, run)


def fits(func: Any, result: torch.dtype, target: torch.dtype) -> None:
    """Raises torch's error for a result that is written into a tensor of a narrower kind of number."""
    if not torch.can_cast(result, target):
        raise RuntimeError(f"{name_of(func)}: the result type {result} cannot be cast to the output type {target}")
