"""The boundary of a stage: where the stream from the stage before comes in, and where it leaves for the next.

    loss_fn(model, batch)                  the user's own call, on every stage; here stage 1 of 3 has blocks.0 and 1
      │
      └► model(tokens)                     the model's own code runs unchanged
           ├► embed       ForeignLayer     returns NotHere, a tensor that no link of this stage may read
           ├► drop(x)                      passes through: NotHere in, NotHere out
           ├► (embed was the last before ours: returns what stage 0 sent)    BoundaryState.enter
           ├► blocks.0    ours             runs
           ├► blocks.1    ours, the last   its hook raises StageDone(y) ─────────────┐
           ┆  norm, head                   never reached                             │
      ┆  cross_entropy                     never reached                             │
    Stage._call   ◄──────────────────────────────────────────────── except StageDone ┘   y goes to stage 2

    backward: y.grad comes from stage 2 ─► autograd ─► Received.backward leaves x.grad with the BoundaryState ─► stage 0

A link that another stage has is a ``ForeignLayer`` and does not compute.  Those before the stage's first link return
``NotHere``, which passes through any code and turns everything made of it into ``NotHere`` too; a link that is given
one would need what another stage has, and is refused.  The last of them returns what the stage before sent; the code
between it and the first link runs here, once.  The model's own input (tokens, a mask) stays what it is.  On all but the
last stage the call ends after the last link, so what follows the last link of all, and the loss, run on the last stage
alone.  Every call checks that links run in the order in which they are named, each once.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.engine.forward.context import CurrentForward, in_backward
from plait.engine.pipeline.stage_model import ForeignLayer, StageModel


class StageDone(Exception):  # noqa: N818 (it is no error)
    """Ends a call of ``loss_fn`` after the stage's last link; hooks that are always called still run."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class NotHere(Tensor):
    """What any but the last foreign layer returns: of the right shape, and not to be computed with."""


class BoundaryState:
    """One microbatch's way over the boundary of a stage, from what the stage before sent, if there is one."""

    def __init__(self, received: Tensor | None) -> None:
        self._received = received
        self._like = None if received is None else (received.shape, received.dtype, received.device)
        self._version = 0 if received is None else received._version
        self.length = None if received is None or received.dim() < 2 else received.size(1)
        """Steps of time of a stream [batch, time, width] on this rank, and over all ranks where it is cut in time."""
        self.whole_length = self.length
        self.gradient: Tensor | None = None
        """Of what was received, if the backward has made one."""
        self.next_link = 0

    def alias(self) -> Tensor:
        """For a foreign layer that is not the last."""
        assert self._received is not None
        stream = self._received.detach()
        if self.whole_length is not None and self.whole_length != self.length:  # code around the links may ask
            stream = stream.new_empty(()).expand(stream.size(0), self.whole_length, *stream.shape[2:])
        return stream.as_subclass(NotHere)

    def enter(self) -> Tensor:
        """For the last foreign layer; what was received is the model's from here on.  ValueError if code before wrote
        to it."""
        received, self._received = self._received, None
        if received is None:
            raise ValueError("a link of the pipeline ran twice, or loss_fn called the model twice: once is right")
        if received._version != self._version:
            raise ValueError(
                "the model writes in place to the activation between two links of the pipeline, which other stages "
                "have: move that into a link"
            )
        if not (received.is_floating_point() or received.is_complex()) or not torch.is_grad_enabled():
            return received
        dummy = torch.zeros((), requires_grad=True, device=received.device)
        return cast(Tensor, cast(Any, Received).apply(dummy, self, [received]))

    def take_gradient(self) -> Tensor | None:
        """What the stage before gets, zeros where the backward made none; None on the first stage."""
        if self._like is None:
            return None
        shape, dtype, device = self._like
        gradient, self.gradient = self.gradient, None
        return torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient


class Received(torch.autograd.Function):
    """What came from the stage before, as a tensor of the graph, which the model may write to in place.  Its gradient
    goes to the ``BoundaryState``; the dummy that is differentiated gets none."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, boundary: BoundaryState, holder: list[Tensor]) -> Tensor:
        ctx.boundary = boundary
        return holder.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.boundary.gradient = gradient
        return None, None, None


class StageBoundary:
    """The links of a stage's model, told when they run; those of other stages are foreign layers.  On the ``last``
    stage calls run to their end."""

    def __init__(self, part: StageModel, number: int, current: CurrentForward, *, last: bool) -> None:
        self.number, self.current, self.last = number, current, last
        self.links, self.names = part.links, part.chain
        self._indices: dict[int, list[int]] = {}
        for index, name in enumerate(self.names):
            link = part.model.get_submodule(name)
            self._indices.setdefault(id(link), []).append(index)
            if isinstance(link, ForeignLayer):
                link.at_call = self._at_foreign_layer
                link.at_look = self._at_look
        for link in dict.fromkeys(part.model.get_submodule(self.names[index]) for index in self.links):
            link.register_forward_pre_hook(self._before_link, with_kwargs=True)  # after other hooks of theirs
            link.register_forward_hook(self._after_link)

    def _reached(self, module: nn.Module) -> BoundaryState:
        """The boundary of the forward that has come to a link, which must be the next one (else ValueError)."""
        boundary: BoundaryState | None = self.current.context.boundary
        if boundary is None:
            raise ValueError(f"stage {self.number} has only some links of the model: train it by engine.step")
        indices, index = self._indices[id(module)], boundary.next_link
        if index not in indices:
            expected = repr(self.names[index]) if index < len(self.names) else "no more"
            raise ValueError(
                f"the pipeline's link {self.names[indices[0]]!r} ran where {expected} was to come: links run once "
                f"each, in the order in which the model names them, and loss_fn calls the model once"
            )
        boundary.next_link += 1
        return boundary

    def _at_foreign_layer(self, module: nn.Module) -> Tensor:
        if in_backward():
            raise ValueError(
                "a checkpoint around several links of the pipeline holds links of two stages: checkpoint inside of a "
                "link, or around one"
            )
        boundary = self._reached(module)
        return boundary.enter() if boundary.next_link == self.links.start else boundary.alias()

    def _at_look(self, module: nn.Module, what: str) -> None:
        """The model looks into a foreign layer: ValueError after the last link: another stage has what it wants."""
        boundary: BoundaryState | None = self.current.context.boundary
        if boundary is not None and boundary.next_link == len(self.names) and not in_backward():
            raise ValueError(
                f"the model's modules are searched, behind their forward, for what they have left there (an auxiliary "
                f"loss, a penalty): {what} of {self.names[self._indices[id(module)][0]]!r} belongs to another "
                f"stage. Let each link hand on what the loss needs in the tensor that it returns, and the last one "
                f"make it; or train without a pipe axis"
            )

    def _before_link(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if in_backward():
            return
        index = self._reached(module).next_link - 1
        if self.links.start and any(isinstance(leaf, NotHere) for leaf in tree_leaves((args, kwargs))):
            raise ValueError(
                f"the pipeline's link {self.names[index]!r} is given something made of the stream before "
                f"{self.names[self.links.start - 1]!r}, which another stage has (a skip connection, or code between "
                f"links that reaches over one): let each link work on what the link before it returned"
            )

    def _after_link(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or self.last or self.current.context.boundary.next_link < self.links.stop:
            return
        name = self.names[self.links.stop - 1]
        if not isinstance(output, Tensor):
            raise ValueError(
                f"stage {self.number} ends with {name!r}, which returns {type(output).__name__}: what goes from stage "
                f"to stage is one tensor; let each link return one"
            )
        if not torch._C._is_fwd_grad_enabled():  # inside the forward of an autograd.Function
            raise ValueError(
                f"{name!r}, the last link of stage {self.number}, runs inside an autograd.Function, where nothing is "
                f"recorded (a checkpoint): use checkpoint(..., use_reentrant=False)"
            )
        raise StageDone(output)
