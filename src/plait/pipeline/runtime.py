"""The runtime: it carries out a rank's line of a schedule, action by action.

It decides nothing.  The schedule (``schedule.orders``) orders the microbatches, and the stage defines the passes.  Here
is the line of a run without a pipeline, F0 B0 F1 B1 ... REDUCE UPDATE; ``pipeline_runtime`` carries out all others.

    F         forward            REDUCE    finish the sums of the step
    B         backward           UPDATE    agree, clip, optimizer, publish
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.forward.context import RNGPosition
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
    position: RNGPosition


class Runtime:
    """Runs the stages of one rank, which it has by number: here, the only one."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self.stages = stages
        self.run_line: Callable[[Line, Handlers], None] = run_line
        """Carries out a line; a time recorder may replace it."""
        self.losses: dict[int, Tensor] = {}
        """The losses of the microbatches, if the last stage is here."""
        self.num_microbatches = 0
        """The number of microbatches of the current step."""

    def evaluate(self, program: RankProgram, batches: Sequence[Any], loss_fn: LossFn) -> None:
        """Runs the forwards of an evaluation, whose program has nothing else; sets ``losses``."""

        def forward(stage: int, m: int, *received: Any) -> Any:
            return self.stages[stage].evaluate(m, loss_fn, batches[m], *received)

        with torch.inference_mode(False), torch.no_grad():  # a boundary asks tensors for their versions
            self._carry_out(program, batches, forward)

    def run(
        self,
        program: RankProgram,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        seed: float,
        update: Callable[[], None],
    ) -> None:
        """Runs one step of this rank.  ``seed`` is the gradient of every loss: the loss scale / the global count.
        ``update`` ends the step; it is called when the ``losses`` are known."""

        def forward(stage: int, m: int, *received: Any, **split: bool) -> Any:
            batch, position = microbatches[m].batch, microbatches[m].position
            return self.stages[stage].forward(m, loss_fn, batch, position, *received, **split)

        self._carry_out(program, [m.batch for m in microbatches], forward, seed, update)

    def _carry_out(
        self,
        program: RankProgram,
        batches: Sequence[Any],
        forward: Callable[..., Any],
        seed: float = 0.0,
        update: Callable[[], None] = lambda: None,
    ) -> None:
        self.losses, self.num_microbatches = {}, len(batches)

        def run_forward(action: Action) -> None:
            self.losses[action.microbatch] = forward(action.stage, action.microbatch)

        def backward(action: Action) -> None:
            s, m = action.stage, action.microbatch
            gradient = torch.full_like(self.losses[m], seed)
            self.stages[s].backward(m, [gradient], last=(action.kind, s, m) in program.last)

        handlers: Handlers = {
            Kind.FORWARD: run_forward,
            Kind.BACKWARD: backward,
            Kind.REDUCE: lambda action: self.stages[action.stage].gradients.finish_sums(),
            Kind.UPDATE: lambda action: update(),
        }
        self.run_line(program.line, handlers)
