"""One runtime that obeys: it carries out a rank's line of a schedule, action by action.

It decides nothing.  Which microbatch comes when is the schedule's business (``core.orders``), how tensors travel the
courier's, what a pass means the stage's.  No pipeline is one stage: plain training goes the same way.

    F         fetch what came from the stage before; forward; leave what goes to the next
    B         fetch the gradient from the next stage, or seed the loss with 1/count; backward; leave dx
    I, W      the same in two parts
    SEND RECV start a message
    UNSHARD   hold a stage's parameters whole        RESHARD   let them go
    REDUCE_GRAD  the microbatch's sum is finished here at the latest (units start theirs as they complete)
    REDUCE    finish a stage's sums of the step      UPDATE    at the last one: agree, clip, optimizer, publish

Beside it the log writes down when each action began and ended, and every wait for others inside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.call import Call
from plait.core.actions import Action, Kind, Line
from plait.core.events import Event, Span
from plait.core.pipeline import Plan
from plait.engine.courier import Courier
from plait.engine.rng import Draw
from plait.engine.stage import LossFn, Stage

Handlers = Mapping[Kind, Callable[[Action], None]]


RECORDED = 5
"""Steps that are remembered."""


class EventLog:
    """What one rank did in the last steps, and when; the newest step is the last.

    Args:
        comm: tells of every wait for others.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.steps: deque[tuple[Event, ...]] = deque(maxlen=RECORDED)
        self._zero = 0.0
        self._waits: list[Span] = []

    def _waited(self, call: Call, start: float, end: float) -> None:
        self._waits.append(Span(start - self._zero, end - self._zero, str(call)))

    def run(self, line: Line, handlers: Handlers) -> None:
        """Carry out a rank's actions in order; the clock starts now."""
        events: list[Event] = []
        self.comm.on_wait = self._waited
        self._zero = time.perf_counter()
        try:
            for action in line:
                self._waits = []
                start = time.perf_counter() - self._zero
                handlers[action.kind](action)
                end = time.perf_counter() - self._zero
                events.append(Event(action, start, end, tuple(self._waits)))
        finally:
            self.comm.on_wait = None
        self.steps.append(tuple(events))


@dataclass(frozen=True)
class Microbatch:
    """What a step brings: a batch, and where in the run it stands."""

    batch: Any
    draw: Draw


class Runtime:
    """The stages of one rank at work.

    Args:
        stages: by number.
    """

    def __init__(self, stages: Mapping[int, Stage], courier: Courier, log: EventLog) -> None:
        self.stages, self.courier, self.log = stages, courier, log
        self.num_stages = 1 + max(courier.owner)
        self.losses: dict[int, Tensor] = {}
        """The losses of the microbatches, where the last stage is here."""

    @property
    def _between(self) -> Handlers:
        """What stands between passes: messages, gathers."""
        stages = self.stages
        return {
            **dict.fromkeys((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B), self.courier.start),
            Kind.UNSHARD: lambda action: stages[action.stage].gathering.hold(),
            Kind.RESHARD: lambda action: stages[action.stage].gathering.release(),
        }

    def evaluate(self, plan: Plan, batches: Sequence[Any], loss_fn: LossFn) -> None:
        """The forwards of an evaluation; ``losses`` then has them, where the last stage is here.

        Args:
            plan: this rank's, of forwards only.
        """
        courier = self.courier
        courier.begin(batches, plan.receipts)
        self.losses = {}

        def forward(action: Action) -> None:
            s, m = action.stage, action.microbatch
            received = courier.fetch("F", s, m) if s else None
            out = self.stages[s].evaluate(m, loss_fn, batches[m], received)
            if s == self.num_stages - 1:
                self.losses[m] = out
            else:
                courier.leave("F", s, m, out)

        self.log.run(plan.line, {Kind.FORWARD: forward, **self._between})
        courier.settle()

    def run(
        self,
        plan: Plan,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        seed: float,
        update: Callable[[], None],
    ) -> None:
        """One step of this rank.

        Args:
            plan: this rank's.
            seed: the gradient of every loss, 1 / the global count.
            update: the end of the step, called with the losses known (see ``losses``).
        """
        stages, courier = self.stages, self.courier
        courier.begin([m.batch for m in microbatches], plan.receipts)
        line, last = plan.line, plan.last
        self.losses = {}
        updates = sum(action.kind is Kind.UPDATE for action in line)

        def forward(action: Action) -> None:
            s, m = action.stage, action.microbatch
            received = courier.fetch("F", s, m) if s else None
            batch, draw = microbatches[m].batch, microbatches[m].draw
            out = stages[s].forward(m, loss_fn, batch, draw, received, split=(s, m) in plan.split)
            if s == self.num_stages - 1:
                self.losses[m] = out.detach()
            else:
                courier.leave("F", s, m, out)

        def gradient_for(s: int, m: int) -> Tensor:
            if s == self.num_stages - 1:
                return torch.full_like(self.losses[m], seed)
            return courier.fetch("B", s, m)

        def leave(s: int, m: int, gradient: Tensor | None) -> None:
            if gradient is not None:
                courier.leave("B", s, m, gradient)

        def backward(action: Action) -> None:
            s, m = action.stage, action.microbatch
            final = (action.kind, s, m) in last
            leave(s, m, stages[s].backward(m, gradient_for(s, m), last=final))

        def input_part(action: Action) -> None:
            s, m = action.stage, action.microbatch
            leave(s, m, stages[s].input(m, gradient_for(s, m)))

        def weight_part(action: Action) -> None:
            s, m = action.stage, action.microbatch
            stages[s].weight(m, last=(action.kind, s, m) in last)

        def finish(action: Action) -> None:
            nonlocal updates
            updates -= 1
            if updates == 0:
                courier.settle()
                update()

        self.log.run(
            line,
            {
                Kind.FORWARD: forward,
                Kind.BACKWARD: backward,
                Kind.INPUT: input_part,
                Kind.WEIGHT: weight_part,
                **self._between,
                Kind.REDUCE_GRAD: lambda action: stages[action.stage].gradients.finish(),
                Kind.REDUCE: lambda action: stages[action.stage].gradients.reduce(),
                Kind.UPDATE: finish,
            },
        )
