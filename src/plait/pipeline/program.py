"""The seam between a stage and the code of its model.

    Stage.forward(m)  ──►  program.forward(received, batch, call)  ──►  handed, or the loss
                              received    tensors of this graph, from the stage before; None on the first stage
                              call()      the user's loss_fn(model, batch), on this stage's part of the model
                              handed      a ``Handed`` for the next stage

A stage knows units, gradients and orders; only its program knows how a part of the model runs.  The base class runs a
whole model, which is the only stage of a run without a pipeline.  ``blocks`` has the program of a chain of blocks.  The
wing ``anymodel`` has one for every other model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.forward.context import CurrentForward
from plait.forward.sites import Sites
from plait.pipeline.message import Handed, shape_of
from plait.table.parallelism import Parallelism
from plait.tensor.time_axis import TimeAxis
from plait.zero.build import SourceModel

BeforeForward = Callable[[Sequence[Any], dict[str, Any]], None]


class StageDone(Exception):  # noqa: N818 (it is not an error)
    """Ends a call of ``loss_fn`` after the stage's last block; hooks that are always called still run."""


class StageProgram:
    """Runs a model that is whole on this stage."""

    def forward(self, received: Handed | None, batch: Any, call: Callable[[], Any]) -> Any:
        """Returns a ``Handed`` for the next stage, or on the last stage the result of ``call``."""
        return call()

    def follow(self) -> None:
        """Copies the changes that the user's program has made to the user's modules since the last step."""


@dataclass(frozen=True)
class Blocks:
    """The names of a model's modules that run in turn: a pipeline cuts between them."""

    names: tuple[str, ...] = ()
    outside: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Modules and parameters in no block, outermost first, with the blocks before which they may run; the number of
    blocks means after the last."""

    def __len__(self) -> int:
        return len(self.names)

    def on_stage(self, blocks: range) -> frozenset[str]:
        """The names of everything that a stage with these blocks has."""
        runs = {*blocks, len(self)} if blocks.stop == len(self) else {*blocks}
        return frozenset(self.names[i] for i in blocks) | {n for n, before in self.outside.items() if before & runs}


@dataclass(frozen=True)
class StagePart:
    """The part of a model that one stage has.

    ``origin`` maps the ``id`` of a part's parameter to the parameter of the whole model: the same one, unless an
    earlier stage of the rank has it.
    """

    model: nn.Module
    origin: Mapping[int, nn.Parameter]
    blocks: Blocks = Blocks()
    program: Callable[[int, CurrentForward], StageProgram] = lambda number, current: StageProgram()
    """Makes the program of a stage, from its number."""


@dataclass(frozen=True)
class StageSettings:
    """The settings that a model's stages have in common; ``count`` is the number of stages on all ranks."""

    whole: SourceModel
    comm: Comm
    parallelism: Parallelism
    count: int
    seed: int = 0
    split_backward: bool = False
    """True if weight gradients are computed in their own passes."""
    before_root: BeforeForward = lambda args, kwargs: None
    """Called with the model's arguments before each forward (see ``Unsharding``)."""

    @cached_property
    def sites(self) -> Sites:
        """The sites of the whole model."""
        return Sites(self.whole.model)

    @cached_property
    def time_axis(self) -> TimeAxis | None:
        """This rank's place on the context axis, one for all of its stages."""
        return TimeAxis(self.comm, ring=self.parallelism.ring_attention) if self.comm.mesh.context > 1 else None


@dataclass(frozen=True)
class ModelCut:
    """A model, cut in stages by the library or by a wing."""

    blocks: Blocks
    part: Callable[[range, set[int], torch.device], StagePart]
    """Returns the part with some blocks.  The set has, by ``id``, the modules and parameters of the rank's earlier
    stages: the part gets copies of them, and adds its own to the set."""
    release: Callable[[Sequence[StagePart]], None] = lambda parts: None
    """Frees the values that only other ranks need."""


def whole(model: nn.Module) -> ModelCut:
    """Returns the cut of a model into a single stage."""
    part = StagePart(model, {id(p): p for p in model.parameters()})
    return ModelCut(Blocks(), lambda blocks, taken, device: part)


class StageInput:
    """Tensors from the stage before, as leaves of this stage's graph, with their gradients."""

    def __init__(self, handed: Handed) -> None:
        self.form, self.device, self.gradients = handed.form, handed.tensors[0].device, dict[int, Tensor]()
        tensors = list(handed.tensors)
        numbers = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
        if numbers and torch.is_grad_enabled():
            dummy = torch.zeros((), requires_grad=True, device=self.device)
            entered = cast(Any, Received).apply(dummy, self.gradients, numbers, [tensors[i] for i in numbers])
            for number, tensor in zip(numbers, entered, strict=True):
                tensors[number] = tensor
        self.received: Handed | None = Handed(tensors, handed.form)
        """The hand-over; dropped after the forward, which keeps the tensors that it needs."""

    def take_gradients(self) -> Handed:
        """Returns the message for the stage before: zeros where the backward made no gradient."""
        made, shapes = self.gradients, self.form.shapes
        back = [
            made.pop(i) if i in made else torch.zeros(sizes, dtype=dtype, device=self.device)
            for i, (sizes, dtype) in enumerate(shapes)
        ]
        return Handed(back, replace(self.form, shapes=tuple(map(shape_of, back))))


class Received(torch.autograd.Function):
    """Tensors from the stage before, in this graph; the model may write to them in place.  Their gradients go to the
    ``StageInput``; the dummy that is differentiated gets none."""

    @staticmethod
    def forward(
        ctx: Any, dummy: Tensor, gradients: dict[int, Tensor], numbers: Sequence[int], holder: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.numbers = gradients, numbers
        ctx.set_materialize_grads(False)
        tensors = tuple(holder)
        holder.clear()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        made = zip(ctx.numbers, gradients, strict=True)
        ctx.gradients.update((number, gradient) for number, gradient in made if gradient is not None)
        return None, None, None, None
