"""What ``p.grad`` is in a loop of one's own, between ``engine.backward`` and the step: something that refuses.

backward    gradients go into the engine's buffers, not yet summed over the ranks
            p.grad of the user's parameters, and of the pieces in optimizer.param_groups     GradientElsewhere
step        sums, clips                               the pieces'                            the real ones
            updates                                   both                                   None
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plait.engine.forward.parameter import GradientElsewhere


class ShownGradients:
    """The parameters that have a stand-in as gradient now, by name."""

    def __init__(self) -> None:
        self._now: list[tuple[str, nn.Parameter, Tensor]] = []
        self._made: dict[int, Tensor] = {}
        """Stand-ins by ``id`` of their parameter."""

    def show(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """These have gradients, elsewhere."""
        with torch._C.DisableTorchFunction():
            for name, parameter in parameters:
                stand_in = self._made.get(id(parameter))
                if stand_in is None:
                    stand_in = self._made[id(parameter)] = GradientElsewhere.of(parameter)
                parameter.grad = stand_in
                self._now.append((name, parameter, stand_in))

    def hide(self) -> None:
        """Stand-ins go; real gradients, which pieces may have by now, stay."""
        with torch._C.DisableTorchFunction():
            for _, parameter, stand_in in self._now:
                if parameter.grad is stand_in:
                    parameter.grad = None
        self._now.clear()

    def check(self) -> None:
        """Raises ValueError where a program has cleared ``p.grad``, or put something else there, since ``show``."""
        with torch._C.DisableTorchFunction():
            for name, parameter, stand_in in self._now:
                if parameter.grad is not stand_in:
                    raise ValueError(
                        f"the gradient of {name!r} was cleared or replaced after engine.backward "
                        f"(model.zero_grad(), p.grad = ...), which would change nothing: discard a step's "
                        f"gradients by optimizer.zero_grad(), and change them in a listener"
                    )
