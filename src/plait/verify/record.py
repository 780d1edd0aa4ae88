"""What every rank of a layout writes down while it trains, and how it comes together on rank 0.

A rank records the pieces that it owns, in the parameters' own coordinates; nothing is gathered by the collectives
under test except the full parameters, which are recorded whole on every rank.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.collect import collect
from plait.core.cells import Strategy
from plait.core.collectives import Entry
from plait.core.styles import CUT_DIM
from plait.engine import Engine
from plait.engine.stage import Stage
from plait.job import Job
from plait.plan.cost import StagePlan, TiedPlan, differences, predict_line
from plait.plan.tensor import predict_tensor
from plait.verify.reference import Piece


@dataclass
class RankRecord:
    """One rank's view of a run."""

    rank: int
    data_rank: int
    losses: list[float] = field(default_factory=list)
    local_losses: list[tuple[float, ...]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    made: list[bool] = field(default_factory=list)
    """Which steps were made."""
    norm_pieces: list[Piece] = field(default_factory=list)
    gradients: list[dict[Piece, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    state: dict[Piece, dict[str, Tensor]] = field(default_factory=dict)
    ledger_differences: list[str] = field(default_factory=list)
    tensor_rank: int = 0
    cuts: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """The fields of the ``TensorCut`` of every parameter that is cut over the tensor axis."""
    peak_open: int = 0
    ties: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    """The weights that several stages use: under which names, stage by stage."""


class Recorder:
    """Listens to an engine and fills a ``RankRecord``.

    Args:
        gradients: whether every step's gradients are kept (they are needed for the proof, not for a long run).
    """

    def __init__(self, comm: Comm, *, gradients: bool = True) -> None:
        self.record = RankRecord(
            comm.rank, comm.mesh.data_rank(comm.rank), tensor_rank=comm.mesh.index(comm.rank, ("tensor",))
        )
        self._gradients = gradients

    def __call__(self, event: str, engine: Engine) -> None:
        if event == "reduced" and self._gradients:
            given = [o for o in engine.owned if engine.update.made and engine.update.have_gradient[o.name]]
            self.record.gradients.append(
                {(o.name, o.run.start, o.run.stop): o.gradient.detach().reshape(-1).to("cpu", copy=True) for o in given}
            )

    def finish(self, engine: Engine) -> RankRecord:
        """Write down what the run ends with."""
        record = self.record
        record.parameters = engine.full_state_dict()
        record.peak_open = engine.peak_open
        record.ties = {edge.name: edge.keys for edge in engine.ties.edges}
        record.norm_pieces = [(o.name, o.run.start, o.run.stop) for o in engine.owned if engine.norm.counts(o)]
        record.cuts = {o.name: astuple(o.cut) for o in engine.owned if o.cut is not None}
        state = engine.optimizer.state if engine.optimizer is not None else {}
        for o in engine.owned:
            values = state.get(o.view, {})
            record.state[(o.name, o.run.start, o.run.stop)] = {
                key: value.detach().reshape(-1).to("cpu", copy=True)
                for key, value in values.items()
                if torch.is_tensor(value)
            }
        return record


def record_layout(
    job: Job, comm: Comm, strategy: Strategy, num_microbatches: int, steps: int, **engine: Any
) -> RankRecord:
    """Train a job under a layout on this rank and write everything down.

    Args:
        engine: further arguments of ``Engine`` (clip, prefetch, cut, units).
    """
    recorder = Recorder(comm)
    model = job.build()
    optimizer = job.optimizer(model.parameters())
    trained = Engine(
        model,
        comm,
        strategy=strategy,
        optimizer=optimizer,
        loss_fn=job.loss_fn,
        count_fn=job.count_fn,
        seed=job.seed,
        listener=recorder,
        **engine,
    )
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    for step in range(steps):
        batches = job.microbatches(
            step, recorder.record.data_rank, comm.mesh.data_size, num_microbatches, str(comm.device)
        )
        predicted = predict(trained, job, batches)
        checking = step == 0 or bool(trained.update.unchecked)  # the engine's own checks, which are no part of a step
        mark = len(comm.ledger)
        result = trained.step(batches)
        if scheduler is not None:
            scheduler.step()
        recorder.record.losses.append(result.loss)
        recorder.record.local_losses.append(result.local_losses)
        recorder.record.norms.append(result.grad_norm)
        recorder.record.made.append(result.made)
        measured = [e for e in comm.ledger.since(mark) if e.note.phase != "setup" or not checking]
        recorder.record.ledger_differences += differences(predicted, measured)
    return recorder.finish(trained)


def predict(engine: Engine, job: Job, batches: Sequence[Any]) -> tuple[Entry, ...]:
    """Every message of a step on these microbatches, before it is made."""
    comm, num, itemsize = engine.comm, len(batches), job.dtype.itemsize
    line = engine.plan(num).line
    leading = [job.leading(batch) for batch in batches]
    entries: list[Entry] = []
    plans = {}
    for number, stage in engine.stages.items():
        local = [(s[0], _length(stage, s[1])) if stage.axis.sequence else s for s in leading]
        received, handed = (
            tuple(math.prod(shape) * width * itemsize for shape in local) for width in _widths(stage, job.width)
        )
        plans[number] = StagePlan(stage.layouts(), handed, received)
        entries += predict_tensor(
            stage.parallel.sites, leading, comm.mesh, itemsize, sequence=stage.axis.sequence, twice=stage.blocks
        )
    tied = [
        TiedPlan(edge.name, tuple(engine.pipeline.owner[s] for s in edge.stages), engine.ties.bytes_owned(edge))
        for edge in engine.ties.edges
    ]
    trainable = len(engine.exchange.names)
    entries += predict_line(line, plans, comm.mesh, engine.strategy, num, trainable, comm.rank, tied)
    return tuple(entries)


def _widths(stage: Stage, width: int) -> tuple[int, int]:
    """The last dim of what a stage gets and hands on: this rank's piece where a column and its row are parted."""
    kinds = [style.kind for style in stage.parallel.styles.values() if style.kind in CUT_DIM]
    piece = _length(stage, width)
    return piece if kinds[:1] == ["row"] else width, piece if kinds[-1:] == ["column"] else width


def _length(stage: Stage, length: int) -> int:
    """This rank's part of a dim that the tensor axis cuts."""
    start, stop = stage.axis.part(length)
    return stop - start


def collect_records(comm: Comm, record: RankRecord) -> list[RankRecord] | None:
    """Every rank's record on rank 0, None on the others."""
    buffer = io.BytesIO()
    torch.save(record.__dict__, buffer)
    every = collect(comm, buffer.getvalue())
    if every is None:
        return None
    return [record, *(RankRecord(**torch.load(io.BytesIO(data), weights_only=True)) for data in every[1:])]
