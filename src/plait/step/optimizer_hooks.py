"""Adds hooks to a stock optimizer: reduce before its step, publish after it.

optimizer.step()
  engine.reduce()        unless the loop has called it
  the update             on this rank's pieces; where it needs whole tensors, between a gather and a scatter
  engine.publish()       with the last optimizer of the step; hooks that a program adds to the step later come after it
optimizer.zero_grad()    between backward and step: throws away the sums so far
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from plait.step.engine import Engine


def drive(optimizer: Optimizer, engine: Engine) -> None:
    """Lets the engine reduce before each step of this optimizer and publish after it."""
    update, clear, depth, entered = optimizer.step, optimizer.zero_grad, 0, False
    assert engine.placed.owned_optimizer is not None
    cut = engine.placed.owned_optimizer.whole_updates[optimizer]

    @wraps(update)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if any(map(callable, (*args, *kwargs.values()))):
            raise ValueError(
                "optimizer.step(closure): the gradients are reduced over the ranks before the update, so the "
                "closure's backward would come too late. Run it first: loss = closure(); optimizer.step()"
            )
        nonlocal depth, entered
        depth, entered = 0, True
        try:
            engine.before_update(optimizer)
            return update(*args, **kwargs)
        finally:
            entered = False

    def begins(*_: Any) -> None:  # a step that calls its base class's step runs the hooks twice
        nonlocal depth
        if not entered and not depth:  # the bound method is older than this engine
            engine.before_update(optimizer)
        if not depth:
            for one in cut:
                one.gather()
        depth += 1

    def ends(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            for one in cut:
                one.scatter()
            engine.after_update(optimizer)

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        engine.discard()
        clear(*args, **kwargs)

    optimizer.register_step_pre_hook(begins)
    optimizer.register_step_post_hook(ends)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
