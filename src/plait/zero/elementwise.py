"""The optimizers that an engine takes, and those among them that may be given pieces of parameters.

element-wise    each element is updated from its own gradient and state: parameters may be cut anywhere
per tensor      each parameter is updated by itself: ranks may own different parameters

These tables list torch's own classes.  A program declares any other optimizer by ``elementwise``; the referee's
sanitizer tests such declarations on the real shapes.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import optim
from torch.optim import Optimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam}
    | {optim.RMSprop, optim.Rprop, optim.SGD}
)
"""torch's classes, with any options, fused and foreach included.  A subclass may do anything, so it is not included."""
PER_TENSOR = ELEMENTWISE | {optim.Adafactor, optim.Muon}

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def several(optimizers: Optimizers | None) -> tuple[Optimizer, ...]:
    """Returns one optimizer, or several, as a tuple.

    Raises:
        TypeError: something that is not a ``torch.optim.Optimizer``.
        ValueError: an optimizer that cannot step without a closure.
    """
    if optimizers is None:
        return ()
    given: Any = optimizers.values() if isinstance(optimizers, Mapping) else optimizers
    if isinstance(given, Optimizer) or not isinstance(given, Iterable):
        given = [given]
    as_tuple = tuple(given)
    if strange := [one for one in as_tuple if not isinstance(one, Optimizer)]:
        raise TypeError(
            f"{type(strange[0]).__name__} is no torch.optim.Optimizer: give one, or a list or a dict of several"
        )
    for one in as_tuple:
        closure = inspect.signature(type(one).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"{type(one).__name__} computes losses and gradients inside of its step(closure), where the engine "
                f"cannot reduce them: use an optimizer whose step needs no closure"
            )
    return as_tuple


def has_stepped(optimizer: Optimizer) -> bool:
    """True if the optimizer has made steps, itself or in the run that its state was loaded from."""
    for state in optimizer.state.values():
        step = state.get("step")
        if any(map(torch.is_tensor, state.values())) if step is None else float(step) > 0:
            return True
    return False


def elementwise(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Declares that an optimizer updates each element from the gradient and state of that element alone.

    An engine may then cut parameters anywhere for it.

    Returns:
        The optimizer.
    """
    vars(optimizer)["_plait_elementwise"] = True
    return optimizer


def declared(optimizer: Optimizer) -> bool:
    """True if the program has called ``elementwise`` on the optimizer."""
    return "_plait_elementwise" in vars(optimizer)


class NotRebuiltError(ValueError):
    """The constructor of an optimizer's class cannot be called with only its settings."""


def rebuilt(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Returns a new optimizer of the same class and settings on other parameters.

    Raises:
        NotRebuiltError: the constructor needs more than the parameters and the optimizer's ``defaults``.
    """
    signature = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    settings = {k: v for k, v in optimizer.defaults.items() if takes_any or k in signature}
    own = [dict(group) for group in groups]
    try:
        inspect.signature(type(optimizer).__init__).bind(None, own, **settings)
    except TypeError as error:
        kind = type(optimizer).__name__
        raise NotRebuiltError(
            f"a new {kind} cannot be built on other parameters ({error}): give what its constructor asks for besides "
            f"the parameters a default, or put it into the defaults that {kind} hands to Optimizer"
        ) from None
    return type(optimizer)(own, **settings)


def is_elementwise(optimizer: Optimizer) -> bool:
    """True for torch's element-wise classes, and for optimizers that the program has declared so."""
    return type(optimizer) in ELEMENTWISE or declared(optimizer)


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer that may not be given pieces of parameters."""
    kind = type(optimizer)
    if is_elementwise(optimizer):
        return
    way_out = 'Use cut="tensor" (whole tensors on one owner) or a row that keeps the optimizer state full (ddp)'
    if kind in PER_TENSOR:
        raise ValueError(f"{kind.__name__} is not element-wise, so parameters cannot be cut anywhere. {way_out}")
    raise ValueError(
        f"{kind.__name__} is not one of torch's element-wise optimizers, so it is not known whether parameters can be "
        f"cut anywhere. {way_out}; or, if it updates each element from the gradient and state of that element alone, "
        f"say so: plait.elementwise(optimizer)"
    )
