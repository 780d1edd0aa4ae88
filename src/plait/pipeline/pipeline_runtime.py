"""The runtime of a pipeline: passes with messages between them, and stages held unsharded for several passes.

F         get the tensors from the stage before; forward; put those for the next
B         get the gradient from the next stage, or seed the loss with scale/count; backward; put dx
I, W      the same in two parts
SEND RECV start a message
UNSHARD   gather a stage's parameters for several passes        RESHARD   free them
REDUCE_GRAD  wait for the microbatch's reductions, which start when a unit has its gradients
REDUCE    finish a stage's sums of the step      UPDATE    at the last one: agree, clip, optimizer, publish
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.pipeline.p2p import PipelineP2P
from plait.pipeline.pipeline_stage import PipelineStage
from plait.pipeline.runtime import Handlers, Runtime
from plait.schedule.actions import Action, Kind
from plait.schedule.pipeline import RankProgram


class PipelineRuntime(Runtime):
    """Runs the stages of one rank of a pipeline."""

    stages: Mapping[int, PipelineStage]

    def __init__(self, stages: Mapping[int, PipelineStage], p2p: PipelineP2P) -> None:
        super().__init__(stages)
        self.p2p, self.num_stages = p2p, 1 + max(p2p.owner)

    def _carry_out(
        self,
        program: RankProgram,
        batches: Sequence[Any],
        forward: Callable[..., Any],
        seed: float = 0.0,
        update: Callable[[], None] = lambda: None,
    ) -> None:
        stages, p2p = self.stages, self.p2p
        updates = sum(action.kind is Kind.UPDATE for action in program.line)
        p2p.begin(batches, program.acks)
        self.losses, self.num_microbatches = {}, len(batches)

        def run_forward(action: Action) -> None:
            s, m = action.stage, action.microbatch
            split = {"split": True} if (s, m) in program.split else {}
            out = forward(s, m, p2p.get("F", s, m) if s else None, **split)
            if isinstance(out, Tensor):
                self.losses[m] = out
            else:
                p2p.put("F", s, m, out)

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
            Kind.FORWARD: run_forward,
            **dict.fromkeys((Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT), backward),
            **dict.fromkeys((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B), p2p.start),
            Kind.UNSHARD: lambda action: stages[action.stage].hold(),
            Kind.RESHARD: lambda action: stages[action.stage].release(),
            Kind.REDUCE_GRAD: lambda action: stages[action.stage].gradients.wait(),
            Kind.REDUCE: lambda action: stages[action.stage].gradients.finish_sums(),
            Kind.UPDATE: finish,
        }
        self.run_line(program.line, handlers)
        p2p.wait_all()  # an evaluation has no update


def runtime_of(stages: Mapping[int, Any], p2p: PipelineP2P | None) -> Runtime:
    """The runtime of some stages; there are no messages without a pipeline."""
    return Runtime(stages) if p2p is None else PipelineRuntime(stages, p2p)
