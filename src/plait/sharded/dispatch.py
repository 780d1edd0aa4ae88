"""From a call to what its rule decides: the slow way, taken once per function, layouts and arguments.

args  --freeze-->  specs and values  --rule-->  OpPlan     kept with the first operand's spec
                                      \\------>  Refusal -> LayoutError, which names operator, layouts, way out
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from plait.core.layout import Layout
from plait.sharded.rules import RULES, named, on_plain
from plait.sharded.spec import OpPlan, Refusal, Spec, SpecCache

ATOMS = {int, float, bool, str, type(None), complex, type(...), torch.dtype, torch.device, torch.memory_format}
"""Types of arguments that stand for themselves in the key of an ``OpPlan``."""

DIRECT: dict[Any, Callable[..., Any]] = {}
"""Functions that handle ShardedTensors themselves, such as ``torch.autograd.grad``."""

MOST_KEPT = 4096
"""``OpPlan``s kept per spec: an operator whose number changes with every call must not fill the memory."""

UNKEPT = {Tensor.__getitem__, *named("std", "var")}
"""Functions whose calls a dict would confuse: 1 and True are one key there, and mean two things to them."""


class LayoutError(ValueError):
    """An operator that would have to communicate, or has no rule; the message names the way out.

    ``fix`` has the layouts in which the operands would do, where there are some.
    """

    def __init__(self, message: str, fix: dict[Spec, Layout] | None = None) -> None:
        super().__init__(message)
        self.fix = fix or {}


def spec_of(value: Any) -> Spec | None:
    """The spec of a ShardedTensor; None of anything else."""
    return getattr(value, "_spec", None) if isinstance(value, Tensor) else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument, lists and dicts looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)


def cache_of(func: Any, args: Any, kwargs: Any) -> SpecCache:
    """The one cache in which the operands' specs are.

    Raises:
        ValueError: they belong to two comms.
    """
    specs = [s for s in map(spec_of, tensors_in([args, kwargs])) if s is not None]
    for spec in specs:
        if spec.cache is not specs[0].cache:
            a, b = specs[0].comm.mesh, spec.comm.mesh
            raise ValueError(
                f"{name_of(func)} of tensors of two comms, on the meshes '{a}' and '{b}': an expression lives on one"
            )
    return specs[0].cache


def freeze(value: Any, cache: SpecCache) -> Any:
    """An argument with specs in the place of tensors and tuples in the place of lists and slices."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, Tensor):
        spec = spec_of(value)
        if spec is None and value.requires_grad and torch.is_grad_enabled():
            raise LayoutError(
                f"a plain tensor {list(value.shape)} that requires a gradient meets ShardedTensors: its gradient would "
                f"be this rank's share only; make it ShardedTensor.from_full(tensor, layout, comm)"
            )
        return spec or cache.replicated(value.shape)
    if isinstance(value, list | tuple):
        return tuple(freeze(v, cache) for v in value)
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return value


def op_plan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """What the rule decides on this call.

    Raises:
        LayoutError: it refuses, or there is none.
    """
    cache = cache_of(func, args, kwargs)
    frozen = tuple(freeze(a, cache) for a in args)
    options = {k: freeze(v, cache) for k, v in kwargs.items()}
    operands = list(_specs((frozen, *options.values())))
    key: Any = (func, *frozen, *options.items())
    kept: dict[Any, OpPlan] = {} if func in UNKEPT else operands[0].op_plans
    try:
        known = kept.get(key)
    except TypeError:  # an argument that cannot be looked up
        kept, key, known = {}, None, None
    if known is not None:
        return known
    try:
        decided = decide(func, frozen, options)
    except Refusal as refusal:
        raise refused(func, operands, refusal) from None
    run = decided.run or func
    if cache.comm.device.type == "meta":  # meta kernels are written in Python, and would read the global shape
        run = on_plain(run)
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = OpPlan(decided.out, run)
    return kept[key]


def refused(func: Any, operands: list[Spec], refusal: Refusal) -> LayoutError:
    """The error that names the operator, the layouts and the way out."""
    text = f"{name_of(func)} of {' and '.join(map(repr, operands))}: {refusal.why}. {refusal.advice()}"
    return LayoutError(text.strip(), {s: to for s, to in refusal.fix.items() if s in operands})


def decide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """Asks the rule; specs stand in the place of tensors.

    Raises:
        Refusal: there is no rule, it does not know these arguments, or it cannot go on without communication.
    """
    rule = RULES.get(func)
    if rule is None:
        raise Refusal("it has no rule for sharded tensors", hint="Compute on .full() or .local, or enter a rule")
    try:
        bound = inspect.signature(rule).bind(func, *args, **kwargs)
    except TypeError as error:
        raise Refusal(f"its rule does not know these arguments ({error})") from None
    if [*_specs((bound.args, *bound.kwargs.values()))] != [*_specs((args, *kwargs.values()))]:
        raise Refusal("its tensors stand in another order than its signature has them: give them by position")
    out = rule(func, *args, **kwargs)
    return OpPlan(out) if isinstance(out, Spec) else out


def _specs(values: Any) -> Iterator[Spec]:
    for v in values:
        if type(v) is Spec:
            yield v
        elif isinstance(v, tuple):
            yield from _specs(v)


def name_of(func: Any) -> str:
    """How messages call a torch function: ``matmul``, ``softmax``, ``T``."""
    name = str(getattr(func, "__name__", func))
    owner = str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return owner if name in ("__get__", "__set__") and owner else name
