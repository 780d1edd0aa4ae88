"""Parameters that a program freezes or thaws between steps.

A parameter that trained when the engine was built keeps its place in the gradients and in the optimizer's state.  One
that was frozen then has no such place.
"""

from torch import nn

from plait.torch_private import DisableTorchFunctionSubclass


class FrozenParameters:
    """Remembers which parameters of a model trained when the engine was built, and which train now."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._first = self._now = self._trains()

    def _trains(self) -> list[bool]:
        with DisableTorchFunctionSubclass():  # parameters at rest answer slowly otherwise
            return [parameter.requires_grad for parameter in self._parameters]

    def changed(self) -> bool:
        """True if parameters were frozen or thawed since the last call.

        Raises:
            ValueError: a parameter was thawed that was frozen when the engine was built.
        """
        now = self._trains()
        if now == self._now:
            return False
        for name, trained, trains in zip(self._names, self._first, now, strict=True):
            if trains and not trained:
                raise ValueError(
                    f"parameter {name!r} was thawed, which was frozen when the Engine was built, so that no memory was "
                    f"given to its gradient: build the Engine while it trains, and freeze it afterwards"
                )
        self._now = now
        return True

    def names(self) -> list[str]:
        """The parameters that were frozen since the engine was built."""
        now = self._trains()
        if now == self._first:
            return []
        return [n for n, trained, trains in zip(self._names, self._first, now, strict=True) if trained and not trains]
