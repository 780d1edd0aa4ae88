"""A layout and its replay run once more, with everything recorded in a few steps: what ``locate`` searches.

The ranks are threads of this process, whatever world the run had: what differs among them is the layout's own doing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm, thread
from plait.pipeline.stage import Stage
from plait.pipeline.stage_model import ForeignLayer
from plait.referee.tape import Mark, Tape
from plait.referee.verify.record import piece_run
from plait.referee.verify.reference import Gradients, Piece, SingleProcess
from plait.run.config import RunConfig
from plait.run.job.job import Job
from plait.step import Engine
from plait.table.tensor_cut import TensorCut


@dataclass
class TracedStep:
    """A step: what the tape has, and what became of the gradients; by piece on a rank, by name in the reference."""

    marks: dict[Mark, Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    """By global microbatch."""
    summed: dict[Any, Tensor] = field(default_factory=dict)
    norm: float | None = None
    clipped: dict[Any, Tensor] = field(default_factory=dict)
    updated: dict[Any, Tensor] = field(default_factory=dict)
    scale: float = 1.0
    """Of the loss, so of the contributions."""
    counts: dict[int, float] = field(default_factory=dict)
    """How many terms the loss of each global microbatch is the sum of; in the reference."""


@dataclass
class RankTrace:
    """Some steps of one rank; ``published`` are whole parameters after the last of them."""

    rank: int
    data_rank: int
    tensor_rank: int
    steps: dict[int, TracedStep] = field(default_factory=dict)
    cuts: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    published: dict[str, Tensor] = field(default_factory=dict)
    norm_pieces: list[Piece] = field(default_factory=list)

    def cut(self, name: str) -> TensorCut | None:
        """How a parameter is cut over the tensor axis."""
        return TensorCut(*self.cuts[name]) if name in self.cuts else None


class LayoutTracer:
    """Listens to one rank's engine."""

    def __init__(self, comm: Comm, window: Collection[int]) -> None:
        mesh = comm.mesh
        self.trace = RankTrace(comm.rank, mesh.data_rank(comm.rank), mesh.index(comm.rank, ("tensor",)))
        self.window, self.tapes = window, list[Tape]()

    def attach(self, engine: Engine) -> None:
        """Listen to an engine that was just built."""
        for stage in engine.stages.values():
            self.tapes.append(Tape(self._microbatch(stage)))
            self.tapes[-1].follow(stage.model, (ForeignLayer,))
        for optimizer in engine.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._given(engine))
        self.trace.cuts = {o.name: astuple(o.cut) for o in engine.owned if o.cut is not None}
        self.trace.norm_pieces = [piece_run(o) for o in engine.owned if engine.norm.counts(o)]

    def _microbatch(self, stage: Stage) -> Callable[[], int | None]:
        def microbatch() -> int | None:
            position = stage.current.context.position
            return position.microbatch if position is not None and position.step in self.window else None

        return microbatch

    def __call__(self, event: str, engine: Engine) -> None:
        if event == "agreed" and engine.steps in self.window:
            step = self.trace.steps[engine.steps] = TracedStep()
            given = [o for o in engine.owned if engine.update.made and engine.update.have_gradient[o.name]]
            step.summed = {piece_run(o): _copy(o.gradient) for o in given}
        if event == "updated" and engine.steps - 1 in self.trace.steps:
            self.trace.steps[engine.steps - 1].updated = {piece_run(o): _copy(o.view) for o in engine.owned}

    def _given(self, engine: Engine) -> None:
        if (step := self.trace.steps.get(engine.steps)) is not None:
            step.clipped = {piece_run(o): _copy(o.view.grad) for o in engine.owned if o.view.grad is not None}

    def end_step(self, number: int, engine: Engine, microbatches: int) -> None:
        """A step is over."""
        if number in self.window:
            step, last = self.trace.steps[number], engine.last
            step.marks = {mark: value for tape in self.tapes for mark, value in tape.marks.items()}
            first = self.trace.data_rank * microbatches
            step.losses = {first + m: loss for m, loss in enumerate(last.local_losses)}
            step.norm = last.grad_norm
        for tape in self.tapes:
            tape.clear()


def trace_layout(job: Job, config: RunConfig, window: Sequence[int]) -> list[RankTrace]:
    """Train a layout up to the end of a window of steps, and record those."""

    def train(comm: Comm) -> RankTrace:
        tracer = LayoutTracer(comm, window)
        engine, scheduler = job.engine(comm, config.measured(job, comm), clip=config.clip, listener=tracer)
        tracer.attach(engine)
        place = tracer.trace.data_rank, comm.mesh.data_size, config.microbatches, str(comm.device)
        for step in range(window[-1] + 1):
            engine.step(job.microbatches(step, *place))
            tracer.end_step(step, engine, config.microbatches)
            if scheduler is not None:
                scheduler.step()
        tracer.trace.published = engine.full_state_dict()
        return tracer.trace

    return thread.run(config.parsed_mesh, train, deadline=config.deadline)


class ReferenceTracer:
    """Listens to a ``SingleProcess``: its steps in the window, and the values that it began and ended with."""

    def __init__(self, window: Collection[int]) -> None:
        self.window = window
        self.steps: dict[int, TracedStep] = {}
        self.initial: Gradients = {}
        self.final: Gradients = {}
        self._scale = 1.0

    def __call__(self, event: str, one: SingleProcess, gradients: Gradients) -> None:
        if event == "built":
            self.tape = Tape(lambda: self._microbatch(one))
            self.tape.follow(one.model)
            self.initial = self._values(one)
            return
        if event == "began":
            self._scale = one.scale
        if one.step not in self.window:
            return
        step = self.steps.setdefault(one.step, TracedStep(scale=self._scale))
        if event == "summed":
            step.marks, step.losses = self.tape.marks, dict(enumerate(one.losses))
            step.counts = {m: float(one.job.count_fn(batch)) for m, batch in enumerate(one.batches)}
            self.tape.clear()
            step.summed = {name: _copy(g).view(g.shape) for name, g in gradients.items()}
        elif event == "clipped":
            step.clipped = {name: _copy(g).view(g.shape) for name, g in gradients.items()}
        elif event == "updated":
            self.final = self._values(one)
            step.updated = {name: self.final[name] for name, p in one.masters.items() if p.requires_grad}

    def _microbatch(self, one: SingleProcess) -> int | None:
        position = one.current.context.position
        return position.microbatch if position is not None and position.step in self.window else None

    @staticmethod
    def _values(one: SingleProcess) -> Gradients:
        return {name: master.detach().clone() for name, master in one.masters.items()}


def _copy(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().reshape(-1).to("cpu", copy=True)
