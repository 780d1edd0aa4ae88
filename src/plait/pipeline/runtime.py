"""The runtime: it carries out a rank's line of a schedule, action by action.

It decides nothing.  The schedule (``schedule.orders``) orders the microbatches, the P2P moves tensors, and the stage
defines the passes.  Plain training takes the same path, as a pipeline with one stage.

    F         get the tensors from the stage before; forward; put those for the next
    B         get the gradient from the next stage, or seed the loss with 1/count; backward; put dx
    I, W      the same in two parts
    SEND RECV start a message
    UNSHARD   gather a stage's parameters for several passes        RESHARD   free them
    REDUCE_GRAD  the microbatch's sum is finished by here (units start theirs as they complete)
    REDUCE    finish a stage's sums of the step      UPDATE    at the last one: agree, clip, optimizer, publish
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.forward.context import RNGPosition
from plait.pipeline.message import Handed
from plait.pipeline.p2p import PipelineP2P
from plait.pipeline.stage import LossFn, Stage
from plait.schedule.actions import Action, Kind, Line
from plait.schedule.pipeline import RankProgram

Handlers = Mapping[Kind, Callable[[Action], None]]


def run_line(line: Line, handlers: Handlers) -> None:
    """Carries out the actions of one rank."""
    for action in line:
        handlers[action.kind](action)


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a step: a batch, and its position in the run."""

    batch: Any
    draw: RNGPosition


class Runtime:
    """Runs the stages of one rank, which it has by number."""

    def __init__(self, stages: Mapping[int, Stage], p2p: PipelineP2P) -> None:
        self.stages, self.p2p = stages, p2p
        self.run_line: Callable[[Line, Handlers], None] = run_line
        """Carries out a line; a time recorder may replace it."""
        self.num_stages = 1 + max(p2p.owner)
        self.losses: dict[int, Tensor] = {}
        """The losses of the microbatches, if the last stage is here."""
        self.num_microbatches = 0
        """The number of microbatches of the current step."""

    def evaluate(self, program: RankProgram, batches: Sequence[Any], loss_fn: LossFn) -> None:
        """Runs the forwards of an evaluation, whose program has nothing else; sets ``losses``."""

        def forward(s: int, m: int, received: Handed | None) -> Handed | Tensor:
            return self.stages[s].evaluate(m, loss_fn, batches[m], received)

        with torch.inference_mode(False), torch.no_grad():  # a boundary asks tensors for their versions
            self._carry_out(program, batches, forward, {})
            self.p2p.wait_all()

    def run(
        self,
        program: RankProgram,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        seed: float,
        update: Callable[[], None],
    ) -> None:
        """Runs one step of this rank.  ``seed`` is the gradient of every loss, 1 / the global count; ``update`` ends
        the step, and is called once the ``losses`` are known."""
        stages, p2p = self.stages, self.p2p
        updates = sum(action.kind is Kind.UPDATE for action in program.line)

        def forward(s: int, m: int, received: Handed | None) -> Handed | Tensor:
            batch, draw = microbatches[m].batch, microbatches[m].draw
            return stages[s].forward(m, loss_fn, batch, draw, received, split=(s, m) in program.split)

        def backward(action: Action) -> None:
            s, m, kind = action.stage, action.microbatch, action.kind
            stage, last = stages[s], (kind, s, m) in program.last
            if kind is Kind.WEIGHT:
                stage.weight(m, last=last)
                return
            seeded = s == self.num_stages - 1
            gradients = [torch.full_like(self.losses[m], seed)] if seeded else p2p.get("B", s, m).tensors
            received = stage.input(m, gradients) if kind is Kind.INPUT else stage.backward(m, gradients, last=last)
            if received is not None:
                p2p.put("B", s, m, received)

        def finish(action: Action) -> None:
            nonlocal updates
            updates -= 1
            if updates == 0:
                if self.num_stages > 1:
                    p2p.wait_all()
                update()

        handlers: Handlers = {
            **dict.fromkeys((Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT), backward),
            Kind.REDUCE_GRAD: lambda action: stages[action.stage].gradients.finish(),
            Kind.REDUCE: lambda action: stages[action.stage].gradients.reduce(),
            Kind.UPDATE: finish,
        }
        self._carry_out(program, [m.batch for m in microbatches], forward, handlers)

    def _carry_out(
        self,
        program: RankProgram,
        batches: Sequence[Any],
        forward: Callable[[int, int, Handed | None], Handed | Tensor],
        others: Handlers,
    ) -> None:
        """Runs this rank's program; ``forward`` gets a stage, a microbatch, and the tensors from the stage before."""
        stages, p2p = self.stages, self.p2p
        if self.num_stages > 1:
            p2p.begin(batches, program.acks)
        self.losses, self.num_microbatches = {}, len(batches)

        def run_forward(action: Action) -> None:
            s, m = action.stage, action.microbatch
            out = forward(s, m, p2p.get("F", s, m) if s else None)
            if isinstance(out, Tensor):
                self.losses[m] = out
            else:
                p2p.put("F", s, m, out)

        handlers: Handlers = {
            Kind.FORWARD: run_forward,
            **dict.fromkeys((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B), p2p.start),
            Kind.UNSHARD: lambda action: stages[action.stage].unsharding.hold(),
            Kind.RESHARD: lambda action: stages[action.stage].unsharding.release(),
            **others,
        }
        self.run_line(program.line, handlers)
