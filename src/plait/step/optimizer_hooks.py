"""The hooks of a stock optimizer: reduce before its step, publish after it.

optimizer.step()
  pre-hook     engine.reduce()        unless the loop has called it
  the update   on this rank's pieces
  post-hook    engine.publish()       with the last optimizer of the step
optimizer.zero_grad()                 between backward and step: the sums so far are thrown away
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.optim import Optimizer

if TYPE_CHECKING:
    from plait.step.engine import Engine

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


class OptimizerHooks:
    """The hooks of one optimizer.  A ``step`` that calls ``super().step()`` runs them twice; the outer call counts."""

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        self.optimizer, self.engine = optimizer, engine
        self._outer: FrameType | None = None
        """The call of ``step`` whose update is under way, or that raised in it."""
        self._inner = 0
        """Calls of ``step`` inside of it."""
        first = optimizer.register_step_pre_hook(self._before)
        optimizer._optimizer_step_pre_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
        self.handles = {first.id, optimizer.register_step_post_hook(self._after).id}
        """The ids of these two hooks."""
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._discard  # type: ignore[method-assign]

    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._outer is not None and _is_running(self._outer):
            self._inner += 1
            return
        if any(map(callable, (*args, *kwargs.values()))):
            raise ValueError(
                "optimizer.step(closure): the gradients are summed over the ranks before the update, so the "
                "closure's backward would come too late. Run it first: loss = closure(); optimizer.step()"
            )
        self.engine.before_update(self.optimizer)
        self._outer, self._inner = sys._getframe(1), 0

    def _after(self, *_: Any) -> None:
        if self._inner:
            self._inner -= 1
            return
        self._outer = None
        self.engine.after_update(self.optimizer)

    def _discard(self, *args: Any, **kwargs: Any) -> None:
        self.engine.discard()
        self._zero_grad(*args, **kwargs)

    def of_step(self) -> tuple[tuple[dict[int, Any], bool], tuple[dict[int, Any], bool]]:
        """All hooks on the optimizer's step by id: those before it (False), and those after it (True)."""
        one: Any = self.optimizer
        return (one._optimizer_step_pre_hooks, False), (one._optimizer_step_post_hooks, True)


def _is_running(frame: FrameType) -> bool:
    """True if this call is on the stack of the thread."""
    now: FrameType | None = sys._getframe(1)
    while now is not None and now is not frame:
        now = now.f_back
    return now is frame


def several(optimizers: Optimizers | None) -> tuple[Optimizer, ...]:
    """One optimizer, or several, as a tuple.

    Raises:
        TypeError: something that is no ``torch.optim.Optimizer``.
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
