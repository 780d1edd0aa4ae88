"""Several optimizers make one step: the first brings all gradients, the last publishes all parameters.

muon.step()     sums, report, clip; then its own parameters         a loop's order is its own, but each steps once
adamw.step()    its own parameters; then all values are published
"""

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeAlias

from torch.optim import Optimizer

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


def several(optimizers: Optimizers | None) -> tuple[Optimizer, ...]:
    """One optimizer, or several, as a tuple; TypeError for something that is no ``torch.optim.Optimizer``, ValueError
    for one that cannot step without a closure."""
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


def check_no_closure(arguments: Iterable[Any]) -> None:
    """Raises ValueError where ``optimizer.step`` was given one: its backward would come after the gradients are due."""
    if any(map(callable, arguments)):
        raise ValueError(
            "optimizer.step(closure): the gradients are summed over the ranks before the update, so the closure's "
            "backward would come too late. Run it first: loss = closure(); optimizer.step()"
        )


def is_inner(optimizer: Optimizer) -> bool:
    """Whether a hook of ``step`` runs inside of another ``step`` of this optimizer.

    torch wraps the ``step`` of every class that it makes an optimizer of, so one that calls ``super().step()`` runs its
    hooks twice; nothing tells it from a step after one that raised, but the frames.
    """
    frame: FrameType | None = sys._getframe()
    around = 0
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == Optimizer.__module__:
            around += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return around > 1


class StepTurns:
    """Which optimizers have stepped, or been zeroed, since the last step was over."""

    def __init__(self) -> None:
        self._stepped: list[Optimizer] = []
        self._zeroed: list[Optimizer] = []

    def begin(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> bool:
        """Whether the step begins with this optimizer; ValueError where it has stepped, or some were zeroed."""
        if self._zeroed:
            raise ValueError(
                f"{_names(self._zeroed)} had its zero_grad() between backward and step, and {_names(optimizers)} share "
                f"the backward: zero all of them, or none"
            )
        if optimizer in self._stepped:
            self.check_all(optimizers)
        return not self._stepped

    def end(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> bool:
        """Whether the step is over."""
        self._stepped.append(optimizer)
        if len(self._stepped) < len(optimizers):
            return False
        self.clear()
        return True

    def zeroed(self, optimizer: Optimizer, optimizers: Sequence[Optimizer], *, summed: bool) -> bool:
        """Whether all gradients, if any are ``summed``, are thrown away; between two optimizers' steps they are not."""
        if self._stepped:
            return False
        if summed and optimizer not in self._zeroed:
            self._zeroed.append(optimizer)
        if summed and len(self._zeroed) < len(optimizers):
            return False
        self._zeroed.clear()
        return True

    def check_all(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises ValueError where some have stepped and others have not."""
        if self._stepped:
            late = [optimizer for optimizer in optimizers if optimizer not in self._stepped]
            raise ValueError(
                f"{_names(late)} has not stepped since the last backward: call step() of every optimizer once"
            )

    def clear(self) -> None:
        """The step is over, or failed."""
        self._stepped.clear()
        self._zeroed.clear()


def _names(optimizers: Iterable[Optimizer]) -> str:
    return " and ".join(type(one).__name__ for one in optimizers)
