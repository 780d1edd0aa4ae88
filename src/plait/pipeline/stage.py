"""The stage of a run without a pipeline: the model, its units, and the passes of each microbatch.

    forward(m)     loss_fn(model, batch)  ──►  the loss
    backward(m)    its gradient           ──►  autograd   ──►  the unit's flat gradients
    evaluate(m)    a forward that no backward follows

A pass sets one ``ForwardContext``, which gives everything inside it its position.  Hooks on the model do the rest:
``unsharding`` gathers parameters around each unit, ``gradients`` takes each gradient as it comes.  Between forward and
backward a stage keeps, for each microbatch, where its backward begins.  A stage of a pipeline does more (see
``pipeline_stage``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from plait.forward.compiled import CompiledUnits, closed_units
from plait.forward.context import CurrentForward, ForwardContext, RNGPosition
from plait.forward.interceptor import Interceptor
from plait.forward.recompute import blocks_of, run_twice
from plait.forward.tensor_parallel import StageAxis
from plait.pipeline.handlers import stage_handlers
from plait.pipeline.program import StagePart, StageSettings
from plait.pipeline.tied_weights import FollowingParameter
from plait.tensor import Parallel
from plait.zero.backward_errors import explained, reached_by, refuse_outside
from plait.zero.build import BuiltUnits
from plait.zero.gradients import Gradients
from plait.zero.unit import parameters_of
from plait.zero.unshard import Unsharding

LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass
class Flight:
    """A microbatch between its forward, which ended with this context, and the last part of its backward."""

    context: ForwardContext
    outputs: Sequence[GradientEdge | Tensor | None] = ()
    """The start of the backward: the loss, or the tensors handed over; None where nothing before them trains."""

    def take_gradients(self) -> Any:
        """Returns the message for the stage before, if there is one."""
        return None


class Stage:
    """A stage, built from its part of the model, whose parameters are already laid in units."""

    def __init__(
        self, settings: StageSettings, number: int, part: StagePart, parallel: Parallel, laid: BuiltUnits
    ) -> None:
        self.model, self.comm, self.units, self.parallel = part.model, settings.comm, laid.units, parallel
        self.number, self.count, self.last = number, settings.count, number == settings.count - 1
        parallelism, names, links = settings.parallelism, laid.names, part.blocks.names
        self.current, self.time_axis = CurrentForward(), settings.time_axis
        self.axis = StageAxis(self.comm, self.current, sequence=parallelism.sequence_parallel)
        handlers = stage_handlers(settings, part, self.units, parallel, self.axis, last=self.last)
        self.interceptor = Interceptor(self.current, handlers)
        around = [] if links else [""]
        closed = closed_units(self.model, [*around, *names], links) if parallelism.compile else []
        self.interceptor.follow(self.model, settings.sites, every=bool(parallel.styles), closed=closed)
        self.compiled = CompiledUnits(self.interceptor, self.model, closed) if closed else None
        """The forwards of compiled units."""
        self.unsharding = Unsharding(self.model, self.units, parallelism.prefetch, self.current, settings.before_root)
        self.program = part.program(number, self.current)
        self.blocks = blocks_of(self.model, names) if parallelism.recompute == "full" else []
        """The names of the modules whose forward runs again in the backward."""
        for name in self.blocks:
            run_twice(self.model, name, self.interceptor, parallel, sequence=self.axis.sequence)
        self.gradients = Gradients(self.unsharding, self.comm)
        self.flights: dict[int, Flight] = {}
        self._is_clean = False
        """True once a backward has reached no trainable parameter outside of all engines."""
        users = dict(settings.whole.model.named_parameters())
        copied = [(p, users[name], flat) for name, p, flat, _ in parameters_of(self.units) if users[name] is not p]
        self._copies = [FollowingParameter(p, user, whole=not (flat.split or user.is_meta)) for p, user, flat in copied]
        """Copies of the user's parameters that an earlier stage of the rank has."""

    def begin_step(self) -> None:
        """Prepares for the first forward of a step, and drops leftovers of one that raised."""
        self.unsharding.drop_step()
        self.unsharding.runs.clear()
        self.unsharding.found.clear()
        self.flights.clear()
        self.look_at_model()
        self.begin_sums()

    def begin_sums(self) -> None:
        """Prepares for the first gradient of a step."""
        self.interceptor.begin_step(training=self.model.training)
        self.gradients.begin_step()
        self.current.begun = 0

    def look_at_model(self) -> None:
        """Notices, before a forward, which parameters were frozen or thawed."""
        for parameter in self._copies:
            parameter.follow()
        for unit in self.units:
            unit.look_at_frozen()

    # ---- forward ------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int, loss_fn: LossFn, batch: Any, position: RNGPosition) -> Tensor:
        """Returns the loss, detached."""
        self.unsharding.begin_forward(microbatch)
        self.current.begin(position, microbatch=microbatch, draws=self.model.training)
        loss = self._loss(self._run(loss_fn, batch))
        self._check_needs_gradient(loss)
        self.flights[microbatch] = Flight(self.current.context, [loss if loss.requires_grad else None])
        return loss.detach()

    def evaluate(self, microbatch: int, loss_fn: LossFn, batch: Any) -> Tensor:
        """Returns the loss, for no backward: under ``no_grad``, with modules in eval mode."""
        self.begin_alone(self.current.context.position, microbatch, draws=self.model.training)
        loss = self._loss(self._run(loss_fn, batch))
        self.unsharding.forget()
        return loss

    def begin_alone(self, position: RNGPosition | None, microbatch: int | None = None, *, draws: bool = False) -> None:
        """Begins a forward outside of ``engine.step``; without a ``microbatch`` for the ledger it goes under the number
        of the last one."""
        number = self.current.context.microbatch if microbatch is None else microbatch
        self.current.begin(position, microbatch=number, draws=draws)

    def _run(self, loss_fn: LossFn, batch: Any) -> Any:
        """Runs the user's function on this stage's part of the model."""
        self.axis.in_loss_fn = True
        try:
            with self.interceptor.on():
                return loss_fn(self.model, batch)
        except RuntimeError as error:
            if type(error) is RuntimeError and self.axis.ways > 1 and self.parallel.cuts and "dtype" not in str(error):
                raise ValueError(
                    f"the model's code fails where each of {self.axis.ways} tensor ranks has pieces, so the tensor "
                    f"plan leaves something out, or does not fit it (does it run on one rank?): {error}"
                ) from error
            raise
        finally:
            self.axis.in_loss_fn = False

    def _loss(self, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() != 0:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"the loss has shape {shape}: return the sum over the microbatch, a scalar")
        return output

    def _check_needs_gradient(self, loss: Tensor) -> None:
        if self.gradients.order and not loss.requires_grad:
            raise ValueError(
                "the loss needs no gradient, so the step would change nothing: it was detached (loss.detach(), "
                "loss.item(), torch.no_grad() around the forward), or nothing that trains went into it"
            )

    # ---- backward -----------------------------------------------------------------------------------------------

    def backward(self, microbatch: int, gradients: Sequence[Tensor], *, last: bool) -> Any:
        """Runs a microbatch's backward from the gradients of its outputs; returns the message for the stage before, if
        there is one.  ``last``: no other backward of the step comes on this stage."""
        flight = self._resume(microbatch)
        self._differentiate(microbatch, flight, gradients, last=last)
        return flight.take_gradients()

    def backward_from(self, loss: Tensor, seed: float) -> None:
        """Runs the backward of a forward that a user's own loop made; ``seed`` is the gradient of the loss."""
        self._check_needs_gradient(loss)
        self._differentiate(None, Flight(self.current.context, [loss]), [torch.full_like(loss, seed)])

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Takes part in another engine's backward through this model: one more microbatch of gradients."""
        self.unsharding.begin_backward(None)
        self.gradients.begin_microbatch(last=False)
        yield
        self.gradients.end_microbatch()
        self.unsharding.end_backward()

    def _differentiate(
        self,
        microbatch: int | None,
        flight: Flight,
        gradients: Sequence[Tensor],
        *,
        last: bool = False,
        split: bool = False,
    ) -> None:
        """Runs the backward, or with ``split`` its input part, which sums nothing; then frees the graph."""
        self.unsharding.begin_backward(microbatch, split=split)
        if not split:
            self.gradients.begin_microbatch(last=last)
        made = [(out, gradient) for out, gradient in zip(flight.outputs, gradients, strict=True) if out is not None]
        if made:
            flight.outputs, (outputs, seeds) = (), zip(*made, strict=True)
            reached = [] if self._is_clean else [p for p in reached_by(outputs) if p.grad is None]
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    torch.autograd.backward(outputs, seeds)
            except RuntimeError as error:
                if (why := explained(error, self.flights)) is not None:
                    raise why from error
                raise
            if reached:
                refuse_outside(reached)
            self._is_clean = True
        if not split:
            self.gradients.end_microbatch()
        self.unsharding.end_backward()

    def _resume(self, microbatch: int, *, over: bool = True) -> Flight:
        """Resumes a microbatch for its backward, or for a part of it; ``over``: for the last time."""
        if microbatch not in self.flights:
            raise ValueError(
                f"microbatch {microbatch} has no forward before it on stage {self.number} (those that have: "
                f"{sorted(self.flights)}): each has one forward and then one backward"
            )
        flight = self.flights.pop(microbatch) if over else self.flights[microbatch]
        self.current.context, self.current.begun = flight.context, 0
        return flight
