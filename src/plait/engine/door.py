"""The door of a stage's model: where the stream from the stage before comes in, and where it leaves for the next.

    loss_fn(model, batch)
        │ model(tokens)                              the user's own call
        ▼
      door ── what was received, in the place of the tokens ──► the stage's links ──► HandedOver ──► next stage

So the user's ``loss_fn`` runs on every stage, and on all but the last its call ends behind the stage's last link.

The links of others hand on what they get, but code of the model *before* the stage's first link runs once more.  Where
it only passes the stream along that does no harm; where it computes on it, several stages would.  So what reaches the
first link must be the very tensor that was received; anything else is refused.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.engine.links import StageModel
from plait.engine.rng import in_backward


class HandedOver(Exception):  # noqa: N818 (it is no error)
    """Ends a call of ``loss_fn`` behind the stage's last link; hooks that are always called see the end of theirs."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class Received(torch.autograd.Function):
    """What came from the stage before, as the model gets it: a tensor of the graph, which may be written to in place.

    Its gradient is left with the door's ``Crossing``; the dummy that is differentiated gets none.
    """

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        assert crossing.received is not None
        return crossing.received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.crossing.gradient = gradient
        return None, None


class Crossing:
    """One microbatch's way through a stage's door.

    ``received`` is what came from the stage before (None on the first stage), and ``gradient`` its gradient, once the
    backward has made it.
    """

    def __init__(self, received: Tensor | None) -> None:
        self.received = received
        self.gradient: Tensor | None = None

    def enter(self) -> Tensor:
        """What the model gets."""
        received = self.received
        assert received is not None
        if not (received.is_floating_point() or received.is_complex()) or not torch.is_grad_enabled():
            return received
        out: Tensor = cast(Any, Received).apply(torch.zeros((), requires_grad=True), self)
        return out


class Door:
    """The hooks on a stage's model.

    Args:
        number: of the stage.
        feed: the keyword under which the model takes the stream (see ``Chain``).
    """

    def __init__(self, part: StageModel, number: int, feed: str | None) -> None:
        self.part, self.number, self.feed = part, number, feed
        signature = inspect.signature(part.model.forward)
        self._signature = signature
        self._first = next(iter(signature.parameters), "")
        self._crossing: Crossing | None = None
        self._inside: Tensor | None = None
        self._calls = 0
        """Of the last link, in this call of ``loss_fn``."""

    def let_in(self) -> None:
        """From now on the model gets what was received; before other hooks look at its arguments."""
        self.part.model.register_forward_pre_hook(self._before, with_kwargs=True)
        link = self.part.model.get_submodule(self.part.first)
        link.register_forward_pre_hook(self._at_first_link, with_kwargs=True)

    def let_out(self) -> None:
        """From now on the model's call ends behind the stage's last link, after other hooks of it."""
        self.part.model.get_submodule(self.part.last).register_forward_hook(self._behind_last_link)

    def open(self, crossing: Crossing) -> None:
        """Before a call of ``loss_fn``."""
        self._crossing, self._calls = crossing, 0

    def close(self) -> None:
        """After it."""
        self._crossing = self._inside = None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._crossing is None:
            raise ValueError(
                f"stage {self.number} got nothing from the stage before: train by engine.step, and let loss_fn call "
                f"model(...) once"
            )
        crossing, self._crossing = self._crossing, None
        x = self._inside = crossing.enter()
        if self.feed is None:
            if self._first in kwargs:
                return args, {**kwargs, self._first: x}
            return (x, *args[1:]), kwargs
        bound = self._signature.bind_partial(*args, **kwargs)
        bound.arguments.pop(self._first, None)
        bound.arguments[self.feed] = x
        named = {name: value for name, value in bound.arguments.items() if self._signature.parameters[name].kind < 4}
        rest = {k: v for k, v in kwargs.items() if k not in named and k != self._first}
        return (), {**rest, **named}

    def _at_first_link(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        inside, self._inside = self._inside, None
        if inside is not None and not _same(inside, next(iter((*args, *kwargs.values())), None)):
            raise ValueError(
                f"the model works on the stream before {self.part.first!r}, outside of the pipeline's links: several "
                f"stages would do it; move it into a module that is a link, or into one of them"
            )

    def _behind_last_link(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls += 1
        if self._calls < self.part.last_calls or in_backward():
            return
        if not isinstance(output, Tensor):
            raise ValueError(
                f"stage {self.number} ends with {self.part.last!r}, which returns {type(output).__name__}: what goes "
                f"from stage to stage is one tensor; let each link of the pipeline return one"
            )
        raise HandedOver(output)


def _same(x: Tensor, y: Any) -> bool:
    """Whether two tensors are one, or a view of the whole of it."""
    return isinstance(y, Tensor) and x.shape == y.shape and x.data_ptr() == y.data_ptr()
