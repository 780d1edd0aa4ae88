"""The runtime of a pipeline: passes with messages between them, and stages held unsharded for several passes.

F         get the tensors from the stage before; forward; put those for the next
B         get the gradient from the next stage, or seed the loss with 1/count; backward; put dx
I, W      the same in two parts
SEND RECV start a message
UNSHARD   gather a stage's parameters for several passes        RESHARD   free them
REDUCE_GRAD  the microbatch's sum is finished by here (units start theirs as they complete)
REDUCE    finish a stage's sums of the step      UPDATE    at the last one: agree, clip, optimizer, publish
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.pipeline.message import Handed
from plait.pipeline.p2p import PipelineP2P
from plait.pipeline.pipeline_stage import PipelineStage
from plait.pipeline.runtime import Handlers, Microbatch, Runtime
from plait.pipeline.stage import LossFn
from plait.schedule.actions import Action, Kind
from plait.schedule.pipeline import RankProgram


class PipelineRuntime(Runtime):
    """Runs the stages of one rank of a pipeline."""

    stages: Mapping[int, PipelineStage]

    def __init__(self, stages: Mapping[int, PipelineStage], p2p: PipelineP2P) -> None:
        super().__init__(stages)
        self.p2p, self.num_stages = p2p, 1 + max(p2p.owner)

    def evaluate(self, program: RankProgram, batches: Sequence[Any], loss_fn: LossFn) -> None:
        """Runs the forwards of an evaluation, whose program has nothing else; sets ``losses``."""

        def forward(s: int, m: int, received: Handed | None) -> Any:
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
        """Runs one step of this rank (see ``Runtime.run``)."""
        stages, p2p = self.stages, self.p2p
        updates = sum(action.kind is Kind.UPDATE for action in program.line)

        def forward(s: int, m: int, received: Handed | None) -> Any:
            batch, position = microbatches[m].batch, microbatches[m].position
            return stages[s].forward(m, loss_fn, batch, position, received, split=(s, m) in program.split)

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
                p2p.wait_all()
                update()

        handlers: Handlers = {
            **dict.fromkeys((Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT), backward),
            Kind.REDUCE_GRAD: lambda action: stages[action.stage].gradients.wait(),
            Kind.REDUCE: lambda action: stages[action.stage].gradients.finish_sums(),
            Kind.UPDATE: finish,
        }
        self._carry_out(program, [m.batch for m in microbatches], forward, handlers)

    def _carry_out(
        self,
        program: RankProgram,
        batches: Sequence[Any],
        forward: Callable[[int, int, Handed | None], Any],
        others: Handlers,
    ) -> None:
        """Runs this rank's program; ``forward`` gets a stage, a microbatch, and the tensors from the stage before."""
        stages, p2p = self.stages, self.p2p
        p2p.begin(batches, program.acks)

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
            Kind.UNSHARD: lambda action: stages[action.stage].hold(),
            Kind.RESHARD: lambda action: stages[action.stage].release(),
            **others,
        }
        self._run_line(program, len(batches), handlers)


def runtime_of(stages: Mapping[int, Any], p2p: PipelineP2P | None) -> Runtime:
    """The runtime of some stages; there are no messages without a pipeline."""
    return Runtime(stages) if p2p is None else PipelineRuntime(stages, p2p)
