"""Several optimizers make one step: the first brings all gradients, the last publishes all parameters.

muon.step()     sums, report, clip; then its own parameters         a loop's order is its own, but each steps once
adamw.step()    its own parameters; then all values are published
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch.optim import Optimizer

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


def several(optimizers: Optimizers | None) -> tuple[Optimizer, ...]:
    """One optimizer, or several, as a tuple.

    Raises:
        TypeError: something that is no ``torch.optim.Optimizer``.
    """
    if optimizers is None:
        return ()
    found: Any = optimizers
    if isinstance(optimizers, Mapping):
        found = optimizers.values()
    elif isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable):
        found = [optimizers]
    every = tuple(found)
    if strange := [one for one in every if not isinstance(one, Optimizer)]:
        raise TypeError(
            f"{type(strange[0]).__name__} is no torch.optim.Optimizer: give one, or a list or a dict of several"
        )
    return every


class StepTurns:
    """Which optimizers have stepped, or been zeroed, since the last step was over."""

    def __init__(self) -> None:
        self._stepped: list[Optimizer] = []
        self._zeroed: list[Optimizer] = []

    def begin(self, optimizer: Optimizer, every: Sequence[Optimizer]) -> bool:
        """Whether the step begins with this optimizer's.

        Raises:
            ValueError: its turn is over, or the gradients of some were thrown away.
        """
        if self._zeroed:
            raise ValueError(
                f"{_names(self._zeroed)} had its zero_grad() between backward and step, and {_names(every)} share the "
                f"backward: zero all of them, or none"
            )
        if any(optimizer is one for one in self._stepped):
            self.check_all(every)
        return not self._stepped

    def end(self, optimizer: Optimizer, every: Sequence[Optimizer]) -> bool:
        """Whether the step is over."""
        self._stepped.append(optimizer)
        if len(self._stepped) < len(every):
            return False
        self.clear()
        return True

    def zeroed(self, optimizer: Optimizer, every: Sequence[Optimizer], *, summed: bool) -> bool:
        """Whether the gradients of all are thrown away; between the steps of two optimizers they are still needed.

        Args:
            summed: there are any.
        """
        if self._stepped:
            return False
        if summed and not any(optimizer is one for one in self._zeroed):
            self._zeroed.append(optimizer)
        if summed and len(self._zeroed) < len(every):
            return False
        self._zeroed.clear()
        return True

    def check_all(self, every: Sequence[Optimizer]) -> None:
        """Raises ValueError where some have stepped and others have not."""
        if self._stepped:
            late = [one for one in every if not any(one is other for other in self._stepped)]
            raise ValueError(
                f"{_names(late)} has not stepped since the last backward: call step() of every optimizer once"
            )

    def clear(self) -> None:
        """The step is over, or failed."""
        self._stepped.clear()
        self._zeroed.clear()


def _names(optimizers: Iterable[Optimizer]) -> str:
    return " and ".join(type(one).__name__ for one in optimizers)
