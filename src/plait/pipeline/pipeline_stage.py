"""One stage of a pipeline: its part of the model, and the passes between its neighbours.

    forward(m)     x from the stage before  ──►  the part's program  ──►  y for the next stage, or the loss
    backward(m)    dy from the next stage   ──►  autograd            ──►  dx for the stage before
    input(m)       the same, weight products deferred;   weight(m)  computes them

The user's ``loss_fn(model, batch)`` runs on every stage (see ``program``), so a stage needs to know nothing about the
loss, and the loss nothing about stages.  Between forward and backward a stage keeps, for each microbatch, its entry and
the edge of its output in the graph.  It does not keep the output itself, whose memory goes with the message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from plait.comm.agree import gather_ints
from plait.forward.context import RNGPosition
from plait.forward.products import Products
from plait.pipeline.message import Handed
from plait.pipeline.p2p import Signature, signature_of
from plait.pipeline.program import StageInput
from plait.pipeline.stage import Flight, LossFn, Stage
from plait.table.collectives import Note
from plait.zero.unit import State


@dataclass
class PipelineFlight(Flight):
    """A microbatch between its forward and its backward, with the tensors that came in."""

    entry: StageInput | None = None

    def take_gradients(self) -> Handed | None:
        """Returns the gradients of the received tensors."""
        return None if self.entry is None else self.entry.take_gradients()


class PipelineStage(Stage):
    """A stage of a pipeline, or the only one of a schedule whose backward comes in two parts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        handlers = self.interceptor.handlers
        self.products = next((one for one in handlers if isinstance(one, Products)), None)
        self._lengths: dict[Signature, int] = {}

    def look_at_model(self) -> None:
        """Notices changes that the program made to its model between steps."""
        self.program.follow()
        super().look_at_model()

    def forward(
        self,
        microbatch: int,
        loss_fn: LossFn,
        batch: Any,
        position: RNGPosition,
        received: Handed | None = None,
        *,
        split: bool = False,
    ) -> Any:
        """Returns the message for the next stage, or on the last stage the loss; detached.

        Args:
            received: the tensors from the stage before, if there is one.
            split: the backward comes in two parts.
        """
        self.unsharding.begin_forward(microbatch, split=split)
        draws, stand_ins = self.model.training, dict[int, Tensor]() if split else None
        self.current.begin(position, microbatch=microbatch, draws=draws, stand_ins=stand_ins)
        entry = None if received is None else StageInput(received)
        output = self._pass(entry, loss_fn, batch)
        flight = self.flights[microbatch] = PipelineFlight(self.current.context, entry=entry)
        if isinstance(output, Tensor):
            self._check_needs_gradient(output)
            flight.outputs = [output if output.requires_grad else None]
            return output.detach()
        flight.outputs = [get_gradient_edge(t) if t.requires_grad else None for t in output.tensors]
        return output._replace(tensors=[t.detach() for t in output.tensors])

    def evaluate(self, microbatch: int, loss_fn: LossFn, batch: Any, received: Handed | None = None) -> Any:
        """Returns the same as ``forward``, for no backward: under ``no_grad``, with modules in eval mode."""
        self.begin_alone(self.current.context.position, microbatch, draws=self.model.training)
        output = self._pass(None if received is None else StageInput(received), loss_fn, batch)
        if not self.unsharding.held:
            self.unsharding.forget()
        return output

    def _pass(self, entry: StageInput | None, loss_fn: LossFn, batch: Any) -> Handed | Tensor:
        """Runs the stage's program, which calls the user's function."""
        output = self.program.forward(self._enter(entry, batch), batch, partial(self._run, loss_fn, batch))
        if isinstance(output, Handed):
            self.unsharding.unwind(output.tensors)
            return output
        if not self.last:
            raise ValueError(
                "loss_fn did not call the model, or caught what ends its call: under a pipeline every stage runs it, "
                "as model(...), outside of try/except"
            )
        return self._loss(output)

    def _enter(self, entry: StageInput | None, batch: Any) -> Handed | None:
        """The tensors from the stage before, for the program; they set the whole length of a stream cut in time."""
        if entry is None:
            return None
        received, entry.received = entry.received, None
        if received is not None and self.axis.sequence and received.tensors[0].dim() > 1:
            self.current.replace(length=self._whole_length(signature_of(batch), received.tensors[0].size(1)))
        return received

    def _whole_length(self, signature: Signature, mine: int) -> int:
        """Steps of time of the whole stream, from this rank's part under sequence parallelism.  It depends on the
        shapes of the batch, so all tensor ranks learn it at the same time."""
        if signature not in self._lengths:
            lengths = gather_ints(self.comm, [mine], ("tensor",), Note("setup"))
            self._lengths[signature] = sum(length for (length,) in lengths)
        return self._lengths[signature]

    def input(self, microbatch: int, gradients: Sequence[Tensor]) -> Handed | None:
        """Runs the input part of a backward; returns the gradients of the received tensors."""
        flight = self._resume(microbatch, over=False)
        self._differentiate(microbatch, flight, gradients, split=True)
        taken: Handed | None = flight.take_gradients()
        return taken

    def weight(self, microbatch: int, *, last: bool) -> None:
        """Runs the weight part: computes every gradient that the input part deferred or kept."""
        stand_ins = self._resume(microbatch).context.stand_ins
        self.unsharding.begin_weights()
        self.gradients.begin_microbatch(last=last)
        assert self.products is not None and stand_ins is not None
        self.products.weigh(stand_ins)
        self.gradients.end_microbatch()

    # ---- held by the schedule -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Carries out UNSHARD: gathers all units at once; the first pass that reads one waits for it."""
        self.unsharding.hold(True)
        for unit in self.units:
            unit.users += 1
            if unit.state is State.SHARDED:
                unit.unshard("unshard", -1)

    def release(self) -> None:
        """Carries out RESHARD; keeps the row's part while any microbatch waits for its backward."""
        self.unsharding.hold(False)
        flying = self.unsharding.num_flying
        for unit in self.units:
            unit.users -= 1
            if unit.state is State.UNSHARDING:
                unit.wait()
            if unit.split and flying:
                unit.keep()
            if unit.split and not unit.pins:
                unit.reshard()
            if not flying:
                unit.forget()
