"""What ``p.grad`` is in a loop of one's own, between ``engine.backward`` and the step: something that refuses.

backward    gradients go into the engine's buffers, not yet summed over the ranks
            p.grad of the user's parameters, and of the pieces in optimizer.param_groups     GradientElsewhere
step        sums, clips                               the pieces'                            the real ones
            updates                                   the user's                             None
                                                      the pieces'                            the real ones still
"""

from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn

from plait.forward.parameter import GradientElsewhere


class ShownGradients:
    """The parameters that have a stand-in as gradient now, by name."""

    def __init__(self) -> None:
        self._now: list[tuple[str, nn.Parameter, Tensor]] = []
        self._left: list[tuple[str, nn.Parameter, Tensor]] = []
        """Those that keep theirs until the next backward."""
        self._made: dict[int, Tensor] = {}
        """Stand-ins by ``id`` of their parameter."""

    def __bool__(self) -> bool:
        return bool(self._now)

    def show(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """These have gradients, elsewhere."""
        with torch._C.DisableTorchFunction():
            for name, parameter in parameters:
                stand_in = self._made.get(id(parameter))
                if stand_in is None:
                    stand_in = self._made[id(parameter)] = GradientElsewhere.of(parameter)
                parameter.grad = stand_in
                self._now.append((name, parameter, stand_in))

    def hide(self, *, but: Container[str] = ()) -> None:
        """Stand-ins go; real gradients, which pieces may have by now, stay.

        ``but``: by name, parameters that the step does not update: an optimizer that the engine does not know of, and
        that would step them, reads a gradient that refuses.  A program may clear it.
        """
        with torch._C.DisableTorchFunction():
            for name, parameter, stand_in in [*self._now, *self._left]:
                if parameter.grad is stand_in and name not in but:
                    parameter.grad = None
        self._left = [one for one in self._now if one[0] in but]
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
