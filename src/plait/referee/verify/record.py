"""Records what every rank of a layout does while it trains, and collects the records on rank 0.

A rank records the pieces that it owns, in the parameters' own coordinates.  The collectives under test gather only the
parameters, which every rank records whole.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from itertools import chain
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from plait.checkpoint.values import decoded, encoded
from plait.comm import Comm, run_threads
from plait.comm.texts import gather_bytes
from plait.forward.random_ops import OwnLayer
from plait.messages.escape import one_line
from plait.messages.progress import counted
from plait.pipeline.stage import Stage
from plait.predict.context import predict_context
from plait.predict.cost import StageTraffic, TiedTraffic, differences, predict_line
from plait.predict.experts import predict_experts, predict_routers
from plait.predict.tensor import predict_tensor, predict_update
from plait.referee.sanitize import sanitized
from plait.referee.tape import Tape
from plait.referee.values import packed, unpacked
from plait.referee.verify.observed import OneStep, Piece, RankRecord
from plait.referee.verify.reference import place_in, uncached
from plait.run.config.machine import resolve_device
from plait.run.config.settings import RunConfig
from plait.run.job.job import Job
from plait.step import Engine, StepResult
from plait.table.collectives import Entry
from plait.table.tensor_plan import (
    BACKWARD,
    BALANCE,
    CONTEXT_BACKWARD,
    CONTEXT_FORWARD,
    EXPERT_BACKWARD,
    EXPERT_FORWARD,
    FORWARD,
)
from plait.tensor.expert_axis import experts_of
from plait.torch_private import DisableTorchFunctionSubclass
from plait.zero.owned import Owned
from plait.zero.planned import layouts_of
from plait.zero.program_reads import INNER


class Recorder:
    """Listens to an engine and fills a ``RankRecord``.

    Args:
        gradients: False if a long run would fill the memory.
        window: the steps that are traced.
    """

    def __init__(self, comm: Comm, *, gradients: bool = True, window: Collection[int] = ()) -> None:
        place = comm.data_rank
        self.record = RankRecord(rank=comm.rank, data_rank=place, tensor_rank=comm.mesh.index(comm.rank, ("tensor",)))
        self._gradients, self._window, self._tapes, self._step = gradients, window, list[Tape](), OneStep()

    def attach(self, engine: Engine) -> None:
        """Traces an engine that was just built."""
        if not self._window:
            return
        for stage in engine.placed.stages.values():
            self._tapes.append(Tape(partial(place_in, stage.current, self._window, self.record.steps)))
            self._tapes[-1].follow(stage.model, (OwnLayer,))

    def __call__(self, event: str, engine: Engine) -> None:
        traced = len(self.record.steps) in self._window
        if event == "agreed" and self._gradients:
            trained = [o for o in engine.placed.owned if engine.reducer.made and engine.reducer.have_gradient[o.name]]
            self._step.summed = {piece_run(o): _copy(o.gradient) for o in trained}
        if event == "stepping" and traced:
            given = ((o, o.view.grad) for o in engine.placed.owned)
            self._step.clipped = {piece_run(o): _copy(gradient) for o, gradient in given if gradient is not None}
        if event == "updated" and traced:
            self._step.updated = {piece_run(o): _copy(o.view) for o in engine.placed.owned}

    def step(self, result: StepResult) -> None:
        """Records the result of a step."""
        step, first = self._step, self.record.data_rank * len(result.local_losses)
        step.loss, step.norm, step.made = result.loss, result.grad_norm, result.made
        step.losses = dict(enumerate(result.local_losses, first))
        step.marks = {mark: value for tape in self._tapes for mark, value in tape.marks.items()}
        for tape in self._tapes:
            tape.clear()
        self.record.steps.append(step)
        self._step = OneStep()

    def finish(self, engine: Engine) -> RankRecord:
        """Records the final values of the run."""
        record = self.record
        record.first = engine.steps - len(record.steps)
        record.parameters = engine.full_state_dict()
        record.ties = {edge.name: edge.keys for edge in engine.placed.ties.edges}
        record.norm_pieces = [piece_run(o) for o in engine.placed.owned if engine.placed.norm.counts(o)]
        flats = [flat for unit in engine.placed.units for flat in unit.flats]
        cuts = [
            (slot.name, cut, f.tensor_rank) for f in flats for slot, cut in zip(f.layout.slots, f.cuts, strict=True)
        ]
        record.cuts = {name: (*astuple(cut), index) for name, cut, index in cuts if cut is not None}
        state = engine.optimizer.state if engine.optimizer is not None else {}
        owner = engine.placed.owned_optimizer
        for o in () if owner is None else owner.owned:
            values = state.get(o.view, {}).items()
            record.state[o.name if o.whole else piece_run(o)] = {
                key: _copy(value) for key, value in values if torch.is_tensor(value)
            }
        return record


def piece_run(owned: Owned) -> Piece:
    """The name of an owned run in a record."""
    return owned.name, owned.run.start, owned.run.stop


def _copy(tensor: Tensor) -> Tensor:
    with DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().reshape(-1).to("cpu", copy=True)


def trace_layout(job: Job, config: RunConfig, window: Sequence[int]) -> list[RankRecord]:
    """Trains a layout again up to the end of a window of steps, and traces those steps.

    The ranks are threads of this process in any case, so a difference among them comes from the layout.
    """
    return in_threads(job, config.with_flags(steps=window[-1] + 1), window)


def in_threads(job: Job, config: RunConfig, window: Collection[int] = ()) -> list[RankRecord]:
    """Calls ``record_run`` on ranks that are threads of this process, on the config's device."""
    machine, device = config.machine, resolve_device(config.machine)
    run = partial(record_run, job, config, window=window)
    return run_threads.run(machine.parsed_mesh, run, deadline=machine.deadline, device=device)


@uncached()
def record_run(job: Job, config: RunConfig, comm: Comm, window: Collection[int] = ()) -> RankRecord:
    """Trains a job under a config's layout on this rank; the record has the gradients of every step."""
    recorder = Recorder(comm, window=window)
    sanitized(comm)
    engine, scheduler = job.engine(comm, config.parallelism, clip=config.task.update.clip, listener=recorder)
    recorder.attach(engine)
    place = recorder.record.data_rank, comm.mesh.data_size, config.layout.microbatches, str(comm.device)
    for step in counted("steps of the layout", range(config.task.samples.steps)):
        batches = job.microbatches(step, *place)
        predicted = predict(engine, job, batches) if job.width else ()
        # The engine's own checks, and headers for new shapes, are not part of a step.
        checking = step == 0 or engine.placed.p2p.learns_from(batches)
        skipped = {"sanitize", *(["setup"] if checking else []), *unpredicted(job, engine)}
        mark = len(comm.ledger)
        recorder.step(engine.step(batches))
        if scheduler is not None:
            scheduler.step()
        predicted = predicted or predict(engine, job, batches)  # with the learned sizes of hand-overs
        measured = [e for e in comm.ledger.since(mark) if e.note.phase not in skipped]
        runs = irregular(engine, len(batches))
        recorder.record.irregular |= runs
        recorder.record.ledger_differences += unlike(predicted, measured, runs)
    return recorder.finish(engine)


def irregular(engine: Engine, num_microbatches: int) -> dict[str, float]:
    """The gathered units that did not run exactly once in each forward of the last step, with their number of runs, and
    those that a unit around them first read in that step, or a backward of the program's own (``torch.autograd.grad``).

    The number of a unit's gathers then depends on the other open units, so they are not predicted.
    """
    ran = [stage.unsharding for stage in engine.placed.stages.values() if stage.unsharding.runs]
    units = [(u.runs[unit], unit, unit in u.found) for u in ran for unit in u.units if unit.split_needs]
    return {unit.name: n / num_microbatches for n, unit, found in units if found or n != num_microbatches}


ON_TENSOR = (
    "not predicted: messages over the tensor, context and expert axes, whose sizes this model's own code decides"
)


def unpredicted(job: Job, engine: Engine) -> frozenset[str]:
    """The phases whose messages are not predicted: those over the tensor, context and expert axes of other people's
    models, and those whose sizes depend on the data."""
    tensor = set() if job.one_stream else {FORWARD, BACKWARD}
    known = any(hasattr(module, "gathered_widths") for module in engine.model.modules())
    context = set() if known else {CONTEXT_FORWARD, CONTEXT_BACKWARD}
    experts = set() if known_experts(job, engine) else {EXPERT_FORWARD, EXPERT_BACKWARD}
    in_parts = engine.comm.mesh.context > 1 or engine.placed.parallelism.sequence_parallel
    counted = job.one_stream and any(hasattr(module, "counted_experts") for module in engine.model.modules())
    balance = {BALANCE} if in_parts and experts_of(engine.model) and not counted else set()
    return frozenset(tensor | context | experts | balance)


def known_experts(job: Job, engine: Engine) -> bool:
    """True if the sizes of the experts' messages are known: their tokens are gathered, and the experts name a width."""
    layers = experts_of(engine.model).values()
    known = all(hasattr(layer, "expert_widths") for layer in layers)
    return known and job.one_stream and not engine.placed.parallelism.all_to_all


def left_out(units: Mapping[str, float]) -> str:
    """Says for people what the prediction leaves out."""
    named = ", ".join(f"{name!r} ({runs:g} times)" for name, runs in units.items())
    return (
        f"not predicted: the gathers of units that do not run once in a forward, or that a unit around them is first "
        f"seen to read, or the program's own torch.autograd.grad: {named}"
    )


def unlike(predicted: Iterable[Entry], measured: Iterable[Entry], units: Mapping[str, float]) -> list[str]:
    """The lines that are in only one of the ledgers, without the gathers of these units."""
    return differences(*([e for e in entries if not _is_gather(e, units)] for entries in (predicted, measured)))


def _is_gather(entry: Entry, units: Mapping[str, float]) -> bool:
    """True for a gather of one of these units, or a reduce of one that never runs: it may have no gradient."""
    phases = ("forward", "backward", INNER, *(() if units.get(entry.note.unit) else ("microbatch",)))
    return entry.note.unit in units and entry.note.phase in phases


def predict(engine: Engine, job: Job, batches: Sequence[Any]) -> tuple[Entry, ...]:
    """Predicts all messages of a step on these microbatches, except those of ``unpredicted``.

    It needs no earlier step, unless the job does not give the width of its activations: then the sizes of the messages
    between stages are those of earlier steps.
    """
    comm, num, itemsize = engine.comm, len(batches), job.dtype.itemsize
    if engine.placed.time_axis is not None:
        batches = [engine.placed.time_axis.cut_batch(batch) for batch in batches]
    line = engine.placed.program(num).line
    leading = [job.leading(batch) for batch in batches]
    entries: list[Entry] = []
    plans = {}
    for number, stage in engine.placed.stages.items():
        sequence = stage.axis.sequence
        rows = [math.prod((s[0], _part(stage, s[1])) if sequence else s) for s in leading]
        if job.width:
            received, handed = (tuple(n * width * itemsize for n in rows) for width in _widths(stage, job.width))
        else:
            size_of = engine.placed.p2p.bytes_handed
            received, handed = (tuple(size_of(number + i, batch) for batch in batches) for i in (-1, 0))
        plans[number] = StageTraffic(layouts_of(stage.unsharding), handed, received)
        if job.one_stream:
            sites = stage.parallel.sites
            entries += predict_tensor(sites, leading, comm.mesh, itemsize, sequence=sequence, twice=stage.blocks)
        layers: Any = experts_of(stage.model)
        for cut in (False, True) if layers and known_experts(job, engine) else ():
            mine = {n: m.expert_widths for n, m in layers.items() if m.expert_axis and m.expert_axis.sequence == cut}
            tokens = rows if cut else [math.prod(shape) for shape in leading]
            entries += predict_experts(mine, comm.mesh, tokens, itemsize, sequence=cut, twice=stage.blocks)
        modules = stage.model.named_modules() if job.one_stream else ()
        routers = {n: m.counted_experts for n, m in modules if hasattr(m, "counted_experts")}
        samples = [shape[0] for shape in leading]
        entries += predict_routers(routers, comm.mesh, samples, itemsize, sequence=sequence, twice=stage.blocks)
        if (axis := engine.placed.time_axis) is not None:
            gathered = {
                name: [width // comm.mesh.tensor for width in module.gathered_widths]
                for name, module in stage.model.named_modules()
                if hasattr(module, "gathered_widths")
            }
            packed = isinstance(batches[0], Mapping) and "documents" in batches[0]
            tokens = [math.prod(shape) for shape in leading]
            entries += predict_context(
                gathered, comm.mesh, tokens, itemsize, packed=packed, ring=axis.ring, twice=stage.blocks
            )
    tied = [
        TiedTraffic(
            edge.name, tuple(engine.placed.pipeline.owner[s] for s in edge.stages), engine.placed.ties.bytes_owned(edge)
        )
        for edge in engine.placed.ties.edges
    ]
    owner = engine.placed.owned_optimizer
    for one in [] if owner is None else chain.from_iterable(owner.whole_updates.values()):
        flat, itemsize = one.piece.flat, one.piece.view.element_size()
        entries += predict_update(one.piece.name, one.cut, flat.axes.cut, flat.tensor_rank, itemsize, owner=one.owner)
    trainable = len(engine.placed.exchange.names)
    return (*entries, *predict_line(line, plans, comm.mesh, engine.placed.strategy, num, trainable, comm.rank, tied))


def _widths(stage: Stage, width: int) -> tuple[int, int]:
    """The last dim of a stage's input and output: a piece if the boundary is between a column and its row."""
    kinds = [style.kind for style in stage.parallel.styles.values() if style.cut_dim is not None]
    piece = _part(stage, width)
    return piece if kinds[:1] == ["row"] else width, piece if kinds[-1:] == ["column"] else width


def _part(stage: Stage, size: int) -> int:
    """The size of this rank's part of a dim that the tensor axis cuts."""
    return len(range(*stage.axis.part(size)))


def collect_records(comm: Comm, record: RankRecord) -> list[RankRecord] | None:
    """Returns every rank's record on rank 0, None on the others."""
    records = gather_bytes(comm, written(record))
    if records is None:
        return None
    return [record, *map(read, records[1:])]


def written(record: RankRecord) -> bytes:
    """A record as bytes."""
    tensors: dict[str, Tensor] = {}
    fields = vars(record) | {"steps": [vars(step) for step in record.steps]}
    about = encoded(fields, tensors)
    return packed(about, {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()})


def read(data: bytes) -> RankRecord:
    """Undoes ``written``; ValueError for other bytes."""
    try:
        about, tensors = unpacked(data)
        fields = decoded(about, tensors.__getitem__)
        return RankRecord(**fields | {"steps": [OneStep(**step) for step in fields["steps"]]})
    except (TypeError, KeyError, SafetensorError) as error:
        raise ValueError(f"the data from a rank is not a record: {one_line(str(error))}") from error
