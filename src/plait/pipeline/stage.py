"""One stage of the model on this rank: its part, its units, and its passes.

    forward(m)     x from the stage before  ──►  the part's program  ──►  y for the next stage, or the loss
    backward(m)    dy from the next stage   ──►  autograd            ──►  dx for the stage before
    input(m)       the same, weight products deferred;   weight(m)  computes them
    evaluate(m)    a forward that no backward follows

A pass sets one ``ForwardContext``, which gives everything inside it its position.  The user's ``loss_fn(model, batch)``
runs on every stage (see ``program``), so a stage needs to know nothing about the loss, and the loss nothing about
stages.  Between forward and backward a stage keeps, for each microbatch, its entry and the edge of its output in the
graph.  It does not keep the output itself, whose memory goes with the message.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plait.comm import Comm
from plait.comm.agree import gather_ints
from plait.forward.at_rest import AtRestCheck, Derivatives
from plait.forward.compiled import CompiledUnits, closed_units
from plait.forward.context import CurrentForward, ForwardContext, RNGPosition
from plait.forward.dropout import DropoutRNG, SliceOf
from plait.forward.interceptor import Handler, Interceptor
from plait.forward.products import Products
from plait.forward.random_ops import all_silent, dropout_layers
from plait.forward.recompute import AttentionRecompute, blocks_of, run_twice
from plait.forward.sites import Sites
from plait.forward.tensor_parallel import StageAxis, StageTensor
from plait.pipeline.backward_errors import explained, reached_by, refuse_outside
from plait.pipeline.message import Handed
from plait.pipeline.p2p import Signature, signature_of
from plait.pipeline.program import StageInput, StagePart
from plait.pipeline.tied_weights import FollowingParameter
from plait.table.collectives import Note
from plait.table.parallelism import Parallelism
from plait.tensor import Parallel
from plait.tensor.expert_axis import outside_experts
from plait.tensor.time_axis import StepsOfTime, TimeAxis
from plait.zero.build import BuiltUnits, SourceModel
from plait.zero.gradients import Gradients
from plait.zero.unit import parameters_of
from plait.zero.unshard import Unsharding

LossFn = Callable[[nn.Module, Any], Tensor]
BeforeForward = Callable[[Sequence[Any], dict[str, Any]], None]


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


@dataclass
class Flight:
    """A microbatch between its forward, which ended with this context, and the last part of its backward."""

    context: ForwardContext
    entry: StageInput | None
    outputs: Sequence[GradientEdge | Tensor | None] = ()
    """The start of the backward: the loss, or the tensors handed over; None where nothing before them trains."""


class Stage:
    """A stage, built from its part of the model, whose parameters are already laid in units."""

    def __init__(
        self, settings: StageSettings, number: int, part: StagePart, parallel: Parallel, laid: BuiltUnits
    ) -> None:
        self.model, self.comm, self.units, self.parallel = part.model, settings.comm, laid.units, parallel
        self.number, self.count, self.last = number, settings.count, number == settings.count - 1
        parallelism = settings.parallelism
        self.current = CurrentForward()
        self.axis = StageAxis(self.comm, self.current, sequence=parallelism.sequence_parallel)
        self.time_axis = settings.time_axis
        self.products: Products | None = None
        self.interceptor = Interceptor(self.current, self._handlers(settings, part.blocks.names))
        names = laid.names
        around = [] if part.blocks.names else [""]
        closed = closed_units(self.model, [*around, *names], part.blocks.names) if parallelism.compile else []
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
        self._lengths: dict[Signature, int] = {}
        users = dict(settings.whole.model.named_parameters())
        copied = [(p, users[name], flat) for name, p, flat, _ in parameters_of(self.units) if users[name] is not p]
        self._copies = [FollowingParameter(p, user, whole=not (flat.split or user.is_meta)) for p, user, flat in copied]
        """Copies of the user's parameters that an earlier stage of the rank has."""

    def _handlers(self, settings: StageSettings, links: Sequence[str]) -> list[Handler]:
        """Returns the handlers that this run needs, in the order of ``interceptor``."""
        current, parameters = self.current, list(parameters_of(self.units))
        recompute = settings.parallelism.recompute
        handlers: list[Handler] = []
        if recompute == "selective":
            attention = AttentionRecompute(current)
            handlers.append(attention)
            if self.count == 1:
                self.model.register_forward_hook(attention.after_model)
        split = {id(p): p for _, p, flat, _ in parameters if flat.split}
        staged = {id(p) for _, p, _, _ in parameters} if self.last and self.count > 1 else set()
        if staged or (split and not all_silent(self.model)):  # torch's own layers read only their own parameters
            handlers.append(AtRestCheck(current, split, staged))
            handlers.append(Derivatives(current, links if self.count > 1 else (), opens=bool(split)))
        if settings.split_backward:
            self.products = Products(current, [p for _, p, flat, _ in parameters if flat.trainable])
            handlers.append(self.products)
        slice_of: Any = StageTensor(self.model, self.parallel, self.axis).slice_of if self.parallel.styles else None
        slice_of = outside_experts(self.parallel.experts, slice_of)
        if self.time_axis is not None:
            slice_of = partial(self._steps_of, self.time_axis, slice_of)
        self.dropout = DropoutRNG(
            settings.seed,
            current,
            slice_of=slice_of,
            recomputes=recompute is not None,
            layers=dropout_layers(self.model),
        )
        handlers.append(self.dropout)
        return handlers

    def _steps_of(self, axis: TimeAxis, other: SliceOf | None, name: str, shape: Sequence[int]) -> StepsOfTime:
        """The steps of time of an activation for which a module draws dropout under a context axis."""
        position = self.current.context.position
        if self.dropout.attends:
            return axis.steps_along(len(shape) - 2, shape[-2])
        steps = None if position is None else axis.steps_of(shape, position.lengths, position.num_samples)
        if steps is None or (other is not None and other(name, shape) is not None):
            raise ValueError(
                f"module {name!r} draws dropout of shape {list(shape)} under context={axis.ways}, and it is not known "
                f"which of its dims is time: draw on [samples, time, ...], not cut by the tensor axis, or leave it out"
            )
        return steps

    def begin_step(self) -> None:
        """Prepares for the first forward of a step, and drops leftovers of one that raised."""
        self.unsharding.drop_step()
        self.unsharding.runs.clear()
        self.unsharding.found.clear()
        self.flights.clear()
        if self.count > 1:
            self.program.follow()
        self.look_at_model()
        self.begin_sums()

    def begin_sums(self) -> None:
        """Prepares for the first gradient of a step."""
        self.interceptor.begin_step(training=self.model.training)
        self.gradients.begin_step()

    def look_at_model(self) -> None:
        """Notices, before a forward, which parameters were frozen or thawed."""
        for parameter in self._copies:
            parameter.follow()
        for unit in self.units:
            unit.look_at_frozen()

    # ---- passes -------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        loss_fn: LossFn,
        batch: Any,
        position: RNGPosition,
        received: Handed | None = None,
        *,
        split: bool = False,
    ) -> Handed | Tensor:
        """Returns the message for the next stage, or on the last stage the loss; detached.

        Args:
            received: the tensors from the stage before, if there is one.
            split: the backward comes in two parts.
        """
        self.unsharding.begin_forward(microbatch, split=split)
        draws, stand_ins = self.model.training, dict[int, Tensor]() if split else None
        self.current.begin(position, microbatch=microbatch, draws=draws, stand_ins=stand_ins)
        entry = None if received is None else StageInput(received)
        output = self._call(entry, loss_fn, batch)
        flight = self.flights[microbatch] = Flight(self.current.context, entry)
        if isinstance(output, Tensor):
            self._check_needs_gradient(output)
            flight.outputs = [output if output.requires_grad else None]
            return output.detach()
        flight.outputs = [get_gradient_edge(t) if t.requires_grad else None for t in output.tensors]
        return output._replace(tensors=[t.detach() for t in output.tensors])

    def evaluate(self, microbatch: int, loss_fn: LossFn, batch: Any, received: Handed | None = None) -> Handed | Tensor:
        """Returns the same as ``forward``, for no backward: under ``no_grad``, with modules in eval mode."""
        self.current.begin(self.current.context.position, microbatch=microbatch, draws=self.model.training)
        output = self._call(None if received is None else StageInput(received), loss_fn, batch)
        if not self.unsharding.held:
            self.unsharding.forget()
        return output

    def begin_alone(self, position: RNGPosition, microbatch: int | None = None) -> None:
        """Begins a forward of a user's own loop; without a ``microbatch`` for the ledger it goes under the number of
        the last one."""
        number = self.current.context.microbatch if microbatch is None else microbatch
        self.current.begin(position, microbatch=number)

    def _call(self, entry: StageInput | None, loss_fn: LossFn, batch: Any) -> Handed | Tensor:
        """Runs the user's function on this stage; without the program if it is the only stage."""

        def call() -> Any:
            with self.interceptor.on():
                return loss_fn(self.model, batch)

        self.axis.in_loss_fn = True
        try:
            output = call() if self.count == 1 else self.program.forward(self._enter(entry, batch), batch, call)
        except RuntimeError as error:
            if type(error) is RuntimeError and self.axis.ways > 1 and self.parallel.cuts and "dtype" not in str(error):
                raise ValueError(
                    f"the model's code fails where each of {self.axis.ways} tensor ranks has pieces, so the tensor "
                    f"plan leaves something out, or does not fit it (does it run on one rank?): {error}"
                ) from error
            raise
        finally:
            self.axis.in_loss_fn = False
        if isinstance(output, Handed):
            self.unsharding.unwind(output.tensors)
            return output
        if not self.last:
            raise ValueError(
                "loss_fn did not call the model, or caught what ends its call: under a pipeline every stage runs it, "
                "as model(...), outside of try/except"
            )
        if not isinstance(output, Tensor) or output.dim() != 0:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"the loss has shape {shape}: return the sum over the microbatch, a scalar")
        return output

    def _enter(self, entry: StageInput | None, batch: Any) -> Handed | None:
        """The tensors from the stage before, for the program; they set the whole length of a stream cut in time."""
        if entry is None:
            return None
        received, entry.received = entry.received, None
        if received is not None and self.axis.sequence and received.tensors[0].dim() > 1:
            self.current.replace(length=self._whole_length(signature_of(batch), received.tensors[0].size(1)))
        return received

    def backward(self, microbatch: int, gradients: Sequence[Tensor], *, last: bool) -> Handed | None:
        """Runs a full backward from the gradients of the outputs; returns the gradients of the received tensors.
        ``last``: no other backward of the step comes on this stage."""
        return self._differentiate(microbatch, self._resume(microbatch), gradients, last=last)

    def backward_from(self, loss: Tensor, seed: float) -> None:
        """Runs the backward of a forward that a user's own loop made; ``seed`` is the gradient of the loss."""
        self._check_needs_gradient(loss)
        flight = Flight(self.current.context, None, [loss])
        self._differentiate(None, flight, [torch.full_like(loss, seed)])

    def _check_needs_gradient(self, loss: Tensor) -> None:
        if self.gradients.order and not loss.requires_grad:
            raise ValueError(
                "the loss needs no gradient, so the step would change nothing: it was detached (loss.detach(), "
                "loss.item(), torch.no_grad() around the forward), or nothing that trains went into it"
            )

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Takes part in another engine's backward through this model: one more microbatch of gradients."""
        self.unsharding.begin_backward(None)
        self.gradients.begin_microbatch(last=False)
        yield
        self.gradients.end_microbatch()
        self.unsharding.end_backward()

    def input(self, microbatch: int, gradients: Sequence[Tensor]) -> Handed | None:
        """Runs the input part of a backward; returns the gradients of the received tensors."""
        return self._differentiate(microbatch, self._resume(microbatch, over=False), gradients, split=True)

    def _differentiate(
        self,
        microbatch: int | None,
        flight: Flight,
        gradients: Sequence[Tensor],
        *,
        last: bool = False,
        split: bool = False,
    ) -> Handed | None:
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
        return None if flight.entry is None else flight.entry.take_gradients()

    def weight(self, microbatch: int, *, last: bool) -> None:
        """Runs the weight part: computes every gradient that the input part deferred or kept."""
        flight = self._resume(microbatch)
        self.unsharding.begin_weights()
        self.gradients.begin_microbatch(last=last)
        assert self.products is not None and flight.context.stand_ins is not None
        self.products.weigh(flight.context.stand_ins)
        self.gradients.end_microbatch()

    def _resume(self, microbatch: int, *, over: bool = True) -> Flight:
        """Resumes a microbatch for its backward, or for a part of it; ``over``: for the last time."""
        if microbatch not in self.flights:
            raise ValueError(
                f"microbatch {microbatch} has no forward before it on stage {self.number} (those that have: "
                f"{sorted(self.flights)}): each has one forward and then one backward"
            )
        flight = self.flights.pop(microbatch) if over else self.flights[microbatch]
        self.current.context = flight.context
        return flight

    def _whole_length(self, signature: Signature, mine: int) -> int:
        """Steps of time of the whole stream, from this rank's part under sequence parallelism.  It depends on the
        shapes of the batch, so all tensor ranks learn it at the same time."""
        if signature not in self._lengths:
            lengths = gather_ints(self.comm, [mine], ("tensor",), Note("setup"))
            self._lengths[signature] = sum(length for (length,) in lengths)
        return self._lengths[signature]
