"""One stage of the model on this rank: its part, its units, and its passes.

    forward(m)     x from the stage before  ──►  the model's own forward  ──►  y for the next stage, or the loss
    backward(m)    dy from the next stage   ──►  autograd                 ──►  dx for the stage before
    input(m)       the same, weight products put off;   weight(m)  makes them
    evaluate(m)    a forward that no backward follows

The user's ``loss_fn(model, batch)`` runs on every stage (see ``door``), so a stage needs to know nothing about the
loss, and the loss nothing about stages.

Between forward and backward a stage keeps, for each microbatch, what it received and the edge of its output in the
graph; not the output itself, whose memory goes with the message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plait.comm import Comm
from plait.core.collectives import Note
from plait.core.flat import UnitLayout
from plait.engine.build import Whole
from plait.engine.courier import Signature, signature_of
from plait.engine.deferred import Deferred
from plait.engine.door import Crossing, Door, Elsewhere, HandedOver
from plait.engine.gathering import Gathering
from plait.engine.gradients import Gradients, parameters_of
from plait.engine.guard import ModelGuard
from plait.engine.links import StageModel
from plait.engine.multiply import Multiply
from plait.engine.recompute import Cores, Recomputation, Recompute, blocks_of, run_twice
from plait.engine.rng import Draw, Streams
from plait.engine.tensor_parallel import TensorParallel
from plait.engine.unit import Unit
from plait.engine.watch import Watch
from plait.tensor.gemm import TORCH, Gemm
from plait.tensor.parallel import Parallel, TensorAxis

LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Place:
    """Where a stage stands: its number, and how many there are."""

    number: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1


@dataclass
class Flight:
    """A microbatch between its forward and its backward."""

    draw: Draw | None
    crossing: Crossing
    output: GradientEdge | Tensor | None = None
    """What the backward starts from; None where nothing before it trains."""


class Stage:
    """A stage, built from its part of the model.

    Args:
        part: whose parameters are laid in ``units`` already.
        whole: the model that it was cut from.
        watch: told which parameters are at rest.
        place: where it stands in the pipeline.
        split_backward: weight gradients are made in passes of their own.
        before_root: called with the model's arguments before each forward (see ``Gathering``).
        recompute: what runs again in the backward (see ``recompute``).
        gemm: multiplies the matrices of linear layers.
    """

    def __init__(
        self,
        part: StageModel,
        whole: Whole,
        place: Place,
        comm: Comm,
        units: list[Unit],
        watch: Watch,
        *,
        parallel: Parallel,
        seed: int,
        prefetch: int,
        sequence: bool,
        split_backward: bool,
        before_root: Callable[[Any, dict[str, Any]], None],
        recompute: Recompute | None = None,
        gemm: Gemm = TORCH,
    ) -> None:
        self.model, self.place, self.comm, self.parallel = part.model, place, comm, parallel
        self.units = units
        self.axis = TensorAxis(comm, sequence=sequence, gemm=gemm)
        trainable = [p for _, p, flat, _ in parameters_of(self.units) if flat.trainable]
        self.streams = Streams(seed)
        self.deferred = Deferred(trainable, gemm, self.streams) if split_backward else None
        products = None
        if parallel.styles:
            sizes = {id(p): c.shape for _, p, f, i in parameters_of(self.units) if (c := f.cuts[i]) is not None}
            products = TensorParallel(self.model, parallel, sizes, self.axis, self.streams, self.deferred)
        if place.last and place.count > 1:
            watch.staged = {id(p) for _, p, _, _ in parameters_of(self.units)}
        watching = watch if watch.staged or any(unit.split for unit in self.units) else None
        multiply = None if gemm is TORCH else Multiply(gemm, self.streams)
        # the last one sees a function first: it reads parameters, where the first may see what stands for them
        again = Recomputation(self.streams, products, watch)
        cores = Cores(again) if recompute == "selective" else None
        beside = (multiply, self.deferred, products, watching, cores)
        self.streams.beside = tuple(mode for mode in beside if mode is not None)
        self.streams.attach(self.model, part.sites, every=products is not None)
        self._lengths: dict[Signature, int] = {}
        self.door = Door(part, place.number, last=place.last)
        self.gathering = Gathering(self.model, self.units, prefetch, self.streams, watch, before_root)
        if place.count > 1:
            self.door.watch(self.model)
        elif cores is not None:
            self.model.register_forward_hook(cores.after_model)
        names = [unit.name for unit in self.units if unit.module is not self.model]
        self.blocks = blocks_of(self.model, names) if recompute == "full" else []
        """The modules whose forward runs again in the backward."""
        run_twice(self.model, self.blocks, parallel, again)
        self.gradients = Gradients(self.gathering, comm)
        self.guard = ModelGuard(self.model)
        self.flights: dict[int, Flight] = {}
        originals = dict(whole.model.named_modules())
        pairs = [(m, originals[n]) for n, m in self.model.named_modules() if n in originals]
        self._twins = [(m, original) for m, original in pairs if m is not original]
        """Copied modules and those of the user's model, whose mode they follow."""

    def begin_step(self) -> None:
        """Before the first forward of a step; whatever an earlier one left behind when it raised is gone."""
        self.gathering.begin_step()
        self.flights.clear()
        for module, original in self._twins:
            module.training = original.training
        self.begin_sums()

    def begin_sums(self) -> None:
        """Before the first gradient of a step."""
        self.guard.check()
        self.gradients.begin_step()

    def layouts(self) -> tuple[UnitLayout, ...]:
        """The units as the planner sees them."""
        borrowed = [u for unit in self.units for u in unit.needs if u is not unit]
        return tuple(unit.layout(1 + sum(b is unit for b in borrowed)) for unit in self.units if unit.flats)

    # ---- passes -------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        loss_fn: LossFn,
        batch: Any,
        draw: Draw,
        received: Tensor | None,
        *,
        split: bool = False,
    ) -> Tensor:
        """What goes to the next stage, detached; from the last stage, the loss.

        Args:
            received: what came from the stage before; None on the first stage.
            split: its backward comes in two parts.
        """
        self._enter(microbatch, draw)
        if self.deferred is not None:
            self.deferred.begin(microbatch if split else None)
        flight = self.flights[microbatch] = Flight(draw, Crossing(received))
        self.gathering.begin_forward(microbatch, split=split)
        output = self._call(flight.crossing, loss_fn, batch)
        if self.place.last:
            flight.output = output if output.requires_grad else None
            return output
        if output.requires_grad:
            flight.output = get_gradient_edge(output)
        return output.detach()

    def evaluate(self, microbatch: int, loss_fn: LossFn, batch: Any, received: Tensor | None) -> Tensor:
        """A forward without a backward to come: under ``no_grad``, with modules in eval mode.

        Args:
            received: as in ``forward``; so is what comes back.
        """
        self._enter(microbatch, None)
        self.gathering.begin_alone(microbatch)
        output = self._call(Crossing(received), loss_fn, batch)
        if not self.gathering.held:
            self.gathering.forget()
        return output

    def _call(self, crossing: Crossing, loss_fn: LossFn, batch: Any) -> Tensor:
        """The user's function on this stage: the loss, or what the stage's last link returned.

        Raises:
            ValueError: a loss that is no scalar, or is made of what another stage has; a function that did not call
                the model.
        """
        if self.axis.sequence and crossing.length is not None:
            self.axis.length = crossing.whole_length = self._whole_length(signature_of(batch), crossing.length)
        self.door.open(crossing)
        self.streams.switch_on(self.model.training)
        loss: Any = None
        handed: Tensor | None = None
        try:
            loss = loss_fn(self.model, batch)
        except HandedOver as over:
            handed = over.tensor
            self.gathering.unwind(handed)
        finally:
            self.streams.switch_off()
            self.door.close()
        if self.place.last:
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"the loss has shape {shape}: return the sum over the microbatch, a scalar")
            if isinstance(loss, Elsewhere):
                raise ValueError(
                    "loss_fn uses something that the model made of an early link's output, which another stage has (an "
                    "auxiliary loss, hidden states): let the last link make what the loss needs"
                )
            return loss
        if handed is None:
            raise ValueError(
                "loss_fn did not call the model, or caught what ends its call: under a pipeline every stage runs it, "
                "as model(...), outside of try/except"
            )
        return handed

    def backward(self, microbatch: int, gradient: Tensor, *, last: bool) -> Tensor | None:
        """A full backward: gradients of the weights, and of what was received.

        Args:
            gradient: of the stage's output.
            last: whether it is the last of the step on this stage.
        """
        flight = self._resume(microbatch)
        if self.deferred is not None:
            self.deferred.begin(None)
        self._backward(microbatch, flight, gradient, last=last)
        return flight.crossing.take_gradient()

    def backward_from(self, loss: Tensor, seed: float) -> None:
        """The backward of a forward that a user's own loop made; ``seed`` is the gradient of the loss."""
        self._backward(None, Flight(None, Crossing(None), loss), torch.full_like(loss, seed), last=False)

    def _backward(self, microbatch: int | None, flight: Flight, gradient: Tensor, *, last: bool) -> None:
        self.gathering.begin_backward(microbatch)
        self.gradients.begin_microbatch(last=last)
        self._run(flight, gradient)
        self.gradients.end_microbatch()
        self.gathering.end_backward()

    def input(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """The input part of a backward: the gradient of what was received."""
        flight = self._resume(microbatch)
        assert self.deferred is not None
        self.deferred.resume(microbatch)
        self.gathering.begin_backward(microbatch, split=True)
        self._run(flight, gradient)
        self.gathering.end_backward()
        return flight.crossing.take_gradient()

    def weight(self, microbatch: int, *, last: bool) -> None:
        """The weight part: every gradient that the input part put off or kept."""
        assert self.deferred is not None
        self.gathering.begin_weights(microbatch)
        self.gradients.begin_microbatch(last=last)
        with torch.autograd.set_multithreading_enabled(False):
            self.deferred.weigh(microbatch)
        self.gradients.end_microbatch()

    def number(self, microbatch: int) -> None:
        """Which forward of a user's own loop begins, for the ledger."""
        self.axis.microbatch = microbatch
        self.gathering.number(microbatch)

    def _resume(self, microbatch: int) -> Flight:
        """A microbatch comes back for its backward."""
        flight = self.flights.pop(microbatch)
        self._enter(microbatch, flight.draw, again=True)
        return flight

    def _enter(self, microbatch: int, draw: Draw | None, *, again: bool = False) -> None:
        self.axis.microbatch = microbatch
        if draw is not None:
            (self.streams.resume if again else self.streams.begin)(draw)

    @staticmethod
    def _run(flight: Flight, gradient: Tensor) -> None:
        if flight.output is not None:
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(flight.output, gradient)
            flight.output = None

    def _whole_length(self, signature: Signature, mine: int) -> int:
        """Steps of time of the whole stream, of which sequence parallelism has cut this rank's part.

        It depends on the shapes of the batch, so all tensor ranks learn it at the same time.
        """
        if signature not in self._lengths:
            every = torch.empty(self.axis.ways, dtype=torch.int64, device=self.comm.device)
            self.comm.all_gather(every, every.new_tensor([mine]), ("tensor",), note=Note("setup")).wait()
            self._lengths[signature] = int(every.sum())
        return self._lengths[signature]
