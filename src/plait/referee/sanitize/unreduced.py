"""Refuses reads of ``p.grad`` between ``engine.backward`` and the step of a program's own loop.

backward    gradients go into the engine's buffers, not yet summed over the ranks
            p.grad of the program's parameters, and of the pieces in optimizer.param_groups     GradientElsewhere
step        sums, clips                               the pieces'                               the real ones
            updates                                   the program's                             None

``torch.nn.utils.clip_grad_norm_(model.parameters())`` would silently clip nothing: its read is refused.
"""

from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from plait.forward.interceptor import Function
from plait.forward.parameter import Elsewhere
from plait.step.engine import Engine
from plait.tensor.metadata import name_of
from plait.torch_private import DisableTorchFunction


class GradientElsewhere(Elsewhere, Tensor):
    """The stand-in for ``p.grad`` while the engine has the gradient."""

    @classmethod
    def refusal(cls, func: Function, values: Sequence[Any]) -> ValueError:
        return ValueError(
            f"{name_of(func)!r} reads p.grad, but after engine.backward the gradients are in the engine's buffers, not "
            f"yet summed over the ranks: clip by engine.reduce(clip=max_norm) or Engine(clip=...), give "
            f"Engine(loss_scale=plait.LossScale()) instead of a GradScaler, discard by optimizer.zero_grad(), and "
            f"look at them with a listener"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"the gradient of shape {tuple(self.shape)} is in the engine's buffers"


class UnreducedGradients:
    """The parameters whose gradient is a stand-in now, by name."""

    def __init__(self) -> None:
        self._now: list[tuple[str, nn.Parameter, Tensor]] = []
        self._left: list[tuple[str, nn.Parameter, Tensor]] = []
        """The parameters that keep their stand-in until the next backward."""
        self._made: dict[int, Tensor] = {}
        """Stand-ins by ``id`` of their parameter."""

    def __call__(self, event: str, engine: Engine) -> None:
        """Follows a step; during ``engine.step`` the program cannot read."""
        if event == "differentiating":
            self.check()
            self.hide()
        elif event == "backward" and engine.in_own_loop:
            owner = engine.placed.owned_optimizer
            owned = engine.placed.owned if owner is None else owner.owned
            pieces = ((piece.name, piece.view) for piece in owned)
            flats = engine.placed.stages[0].gradients.flats
            touched = ((g.name(index), g.flat.parameters[index]) for g in flats for index in g.touched)
            self.show(chain(touched, pieces))
        elif event == "reducing":
            self.check()
        elif event == "stepping" and self._now:
            groups = () if engine.placed.owned_optimizer is None else engine.placed.owned_optimizer.groups.values()
            known = {name for of_one in groups for group in of_one for name in group}
            self.hide(but=set(engine.placed.exchange.names) - known)
        elif event in ("begun", "discarded", "off"):
            self.hide()

    def show(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Gives these parameters stand-ins: their gradients are elsewhere."""
        with DisableTorchFunction():
            for name, parameter in parameters:
                if (stand_in := self._made.get(id(parameter))) is None:
                    number = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                    stand_in = number.expand(parameter.shape).as_subclass(GradientElsewhere)
                    self._made[id(parameter)] = stand_in
                parameter.grad = stand_in
                self._now.append((name, parameter, stand_in))

    def hide(self, *, but: Container[str] = ()) -> None:
        """Removes stand-ins; real gradients, which pieces may have by now, stay.

        ``but``: the names of parameters that the step does not update: their stand-ins stay, and refuse an unknown
        optimizer that would step them.  A program may clear them.
        """
        with DisableTorchFunction():
            for name, parameter, stand_in in [*self._now, *self._left]:
                if parameter.grad is stand_in and name not in but:
                    parameter.grad = None
        self._left = [one for one in self._now if one[0] in but]
        self._now.clear()

    def check(self) -> None:
        """Raises ValueError if a program has cleared or replaced ``p.grad`` since ``show``."""
        with DisableTorchFunction():
            for name, parameter, stand_in in self._now:
                if parameter.grad is not stand_in:
                    raise ValueError(
                        f"the gradient of {name!r} was cleared or replaced after engine.backward "
                        f"(model.zero_grad(), p.grad = ...), which would change nothing: discard a step's "
                        f"gradients by optimizer.zero_grad(), and change them in a listener"
                    )
