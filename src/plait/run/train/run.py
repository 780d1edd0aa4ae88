"""``plait train``: trains a job under a layout, shows its costs and, on request, that it is the one-process run.

    job, engine  ──►  _steps: one object a step  ──►  sinks, screen  ──►  summary, and the comparison

Every rank runs ``run_train``; rank 0 prints.  Bytes held and sent are predicted from the table and measured.
"""

import math
import platform
import shlex
import signal
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim.lr_scheduler import LRScheduler

from plait import __version__
from plait.checkpoint.files.writing import write_json, write_text
from plait.checkpoint.same_folder import check_same_folder
from plait.checkpoint.save import Saver
from plait.comm import Comm
from plait.comm.agree import gather_ints
from plait.messages.escape import say
from plait.messages.wording import human
from plait.predict.memory import Held, held
from plait.referee.sanitize import sanitized
from plait.referee.sanitize.drift import DriftCheck
from plait.referee.verify.compare import BITWISE, against_tree, asked
from plait.referee.verify.locate import replay
from plait.referee.verify.record import ON_TENSOR, Recorder, collect_records, irregular, left_out, predict, unpredicted
from plait.referee.verify.run import findings_table
from plait.run.config.file import to_toml
from plait.run.config.machine import resolve_world
from plait.run.config.room import activation_bytes, predictable
from plait.run.config.settings import TrainConfig
from plait.run.config.sinks import Sinks, open_sinks
from plait.run.data.workers import StepStream
from plait.run.formats.huggingface import write_folder
from plait.run.injection import inject
from plait.run.job.job import Job, make_job
from plait.run.job.sections import flags
from plait.run.measure.machine import peak_memory
from plait.run.report.page.lanes import measured_lanes, timeline_lanes
from plait.run.report.page.trained import FinishedRun, Totals
from plait.run.report.screen import screen, working
from plait.run.report.trace import trace_json
from plait.run.report.training import ProgressView, RankBytes, bytes_table
from plait.run.train.report import plan_of, totals, write_report
from plait.run.train.resume import SETTINGS, SUMMARY, extra_of, folder_of, layout_of, remove_later, resume
from plait.run.train.timeline import EventLog, record_timeline, show_timeline
from plait.step import Engine
from plait.step.late import LateResult
from plait.step.placed_model import PlacedModel
from plait.table.cells import TABLE
from plait.table.collectives import Entry, Note
from plait.table.mesh import AXES

STATES = ("params", "grads", "optimizer")
"""The kinds of state that a rank holds between steps."""

UNPREDICTED = ("setup", "state", "sanitize")
"""Phases that the prediction of a step leaves out."""


@dataclass
class Training:
    """This rank's part of a run, set up."""

    config: TrainConfig
    job: Job
    comm: Comm
    engine: Engine
    scheduler: LRScheduler | None
    recorder: Recorder
    layouts: list[str] = field(default_factory=list)
    """The layouts of the run so far, this one last."""
    first: int = 0
    """The step, from 0, at which this part of the run begins."""
    saver: Saver | None = None
    stopped: tuple[int, int] | None = None
    """The (rank, signal) of the request after which all ranks ended."""
    sent: int | None = None
    """Bytes that this rank sent in the first step, which is the one that is predicted."""
    crossed: int = 0
    """Bytes of ``sent`` over axes that cross hosts."""
    messages: Totals = field(default_factory=dict)
    """The messages of that step; empty if there were more than the ledger keeps."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The batches that this rank reads: its data rank, the number of data ranks, and the microbatches of each."""
        mesh = self.comm.mesh
        return mesh.data_rank(self.comm.rank), mesh.data_size, self.config.layout.microbatches

    @property
    def activations(self) -> int | None:
        """Bytes that this rank's stages keep of a microbatch from its forward to its backward; None: not predicted."""
        placed = self.engine.placed
        links = [name for stage in placed.stages for name in links_of(placed, stage)]
        return activation_bytes(self.config, links) if predictable(self.config) else None


def run_train(config: TrainConfig, comm: Comm, argv: Sequence[str] = ()) -> int:
    """Runs this rank's part of a run that was started by ``argv``; returns 1 if the comparison asked for fails."""
    outlived = config.output.out is not None  # the results of the run are written there
    console = screen(outlived=outlived, quiet=comm.rank > 0, stderr=config.files.json == "-", soft_wrap=True)
    job = make_job(config.task, config.dtypes)
    config = config.with_flags(steps=job.steps)  # epochs have become steps
    sanitized(comm).engine_watchers += (partial(DriftCheck, every=config.course.check_drift),)
    engine, scheduler = job.engine(
        comm, config.parallelism, clip=config.task.update.clip, nonfinite=config.course.nonfinite
    )
    log = EventLog(engine)
    training = Training(config, job, comm, engine, scheduler, Recorder(comm, gradients=False))
    _show_header(training, console)
    layouts = resume(config, job, comm, engine, scheduler, console)
    training.first, now = engine.steps, layout_of(config)
    training.layouts = layouts if layouts[-1:] == [now] else [*layouts, now]
    losses, rates = array("f"), array("f")  # of each step, 4 bytes each
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    steps, unit = range(engine.steps, config.task.samples.steps), config.task.family.unit
    view = ProgressView(console, steps.start + 1, steps.stop, config.course.log_every, unit)
    stream = job.stream(steps, *training.place, str(comm.device), config.course.workers)
    sinks = Sinks()
    if comm.rank == 0:
        sinks = open_sinks(  # comes first: a folder to which another run is writing stays as it is
            config.output.out,
            tensorboard=config.output.tensorboard,
            wandb=config.output.wandb,
            settings=flags(config),
            after=engine.steps,
        )
        if config.output.out:
            remove_later(config, engine.steps)
            (Path(config.output.out) / SUMMARY).unlink(missing_ok=True)
            write_text(Path(config.output.out) / SETTINGS, to_toml(config))
    if config.output.save_every is not None:
        training.saver = Saver(folder_of(config), engine, keep=config.output.keep)
        check_same_folder(folder_of(config).parent, comm)
    inject(engine, config.course.inject)
    with sinks, view, stream, training.saver or nullcontext():
        try:
            for line in _steps(training, stream):
                sinks.write(line)
                view.show(line)
                losses.append(line["loss"])
                rates.append(line["tokens"] / line["seconds"])
                first, last = first or line, line
                if config.files.json and comm.rank == 0:
                    lines.append(line)
        except FloatingPointError as error:
            late = isinstance(engine.last, LateResult)  # whose step was counted
            sinks.write({"step": engine.last.step + 1 if late else engine.steps + 1, "stopped": str(error)})
            raise
    if training.stopped:
        return _tell_stop(training)
    batches = job.microbatches(training.first, *training.place)  # of the step whose messages were counted
    entries = predict(engine, job, batches)
    ranks, recorded, rate = _bytes_per_rank(training, entries), record_timeline(engine, log), statistics.median(rates)
    console.print(f"loss {first['loss']:.4f} -> {last['loss']:.4f}")
    console.print(f"{rate:,.0f} {unit}/s (median over steps, all ranks)")
    console.print(bytes_table(ranks))
    if runs := irregular(engine, config.layout.microbatches):
        console.print(left_out(runs), soft_wrap=True)
    if comm.mesh.count(("tensor", "context", "expert")) > 1 and unpredicted(job, engine):
        console.print(ON_TENSOR, soft_wrap=True)
    if recorded is not None and engine.placed.pipeline.num_stages > 1:
        show_timeline(recorded, console, engine.placed.split)
    same = _compare(training, console) if config.course.verify else None
    if config.output.export:
        write_folder(config.output.export, engine, getattr(config.task.sizes, "path", None))
        console.print(f"the model, for transformers, in {config.output.export}")
    if recorded is None:
        return 0
    summary = {
        "command": shlex.join(["plait", *argv]),
        "versions": {"plait": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "config": flags(config),
        "parameters": engine.placed.num_parameters,
        "steps": len(losses),
        "resumed_at": training.first or None,
        "first_loss": first["loss"],
        "last_loss": last["loss"],
        "eval_loss": last.get("eval_loss"),
        f"{unit}_per_second": rate,
        "peak_memory": last["peak_memory"],
        "bytes_per_rank": [asdict(r) for r in ranks],
        "stages": engine.placed.split,
        "busy_share_per_rank": recorded.busy,
        "idle_share": dict(zip(("measured", "simulated"), recorded.idle, strict=True)),
        "equal_to_one_process": same,
    }
    write_json(config.files.json, summary | {"metrics": lines})
    if config.output.out:
        lanes = measured_lanes(recorded.typical), timeline_lanes(recorded.simulated)
        write_text(Path(config.output.out) / "trace.json", trace_json(*lanes))
        report = FinishedRun(
            name=f"{config.task.title}, {config.row.name} on {comm.mesh}",
            notes=header(training),
            mesh=comm.mesh,
            row=config.row,
            unit=unit,
            ranks=ranks,
            activations=training.activations,
            predicted=totals(entries),
            measured=training.messages,
            log=recorded.typical,
            simulated=recorded.simulated,
            plan=plan_of(config.task, config.layout, config.machine, config.row, config.output.cluster),
            rows=[config.task.in_dtype(row) for row in TABLE.values()],
        )
        write_json(str(Path(config.output.out) / SUMMARY), summary)
        write_report(Path(config.output.out), report)
        console.print(f"report.html, metrics, config, summary and trace.json (for Perfetto) in {config.output.out}")
    return 1 if same is False else 0


def links_of(placed: PlacedModel, stage: int) -> tuple[str, ...]:
    """The names of a stage's links; none if there is only one stage."""
    first = sum(placed.split[:stage])
    return placed.links[first : first + placed.split[stage]]


def _show_header(training: Training, console: Console) -> None:
    """Shows the model and its layout on the ranks."""
    config, engine = training.config, training.engine
    first, *others = header(training)
    console.print(first)
    if getattr(config.task.sizes, "from_scratch", False):
        as_bytes = "; each byte is a token, unless the data has tokens" if config.task.sizes.reads_bytes else ""
        console.print(f"initial values are drawn: the folder has no weights{as_bytes}")
    for line in others:
        console.print(line)
    if engine.placed.pipeline.num_stages > 1:
        for stage, rank in sorted(engine.placed.pipeline.owner.items()):
            names = links_of(engine.placed, stage)
            console.print(f"stage {stage} on pipe rank {rank}: {names[0]} .. {names[-1]} ({len(names)} links)")
    if (kept := training.activations) is not None:
        recompute = config.layout.recompute or "none"
        console.print(f"activations of a microbatch on rank 0: {human(kept)} predicted (recompute: {recompute})")


def header(training: Training) -> list[str]:
    config, engine, mesh = training.config, training.engine, training.comm.mesh
    task = config.task
    return [
        f"{task.title}, {engine.placed.num_parameters:,} parameters, {task.network.dtype}, {task.samples.batch} "
        f"samples a step, microbatches per rank: {config.layout.microbatches}",
        f"{engine.placed.strategy}",
        f"mesh {mesh}: {mesh.size} ranks ({resolve_world(config.machine)} world)",
    ]


def _steps(training: Training, stream: StepStream) -> Iterator[dict[str, Any]]:
    """Trains; yields one dict per step."""
    config, comm, engine = training.config, training.comm, training.engine
    held_out = []
    if config.course.eval_every is not None:
        held_out = training.job.eval_batches(*training.place, str(comm.device))[: config.course.eval_steps]
    for step in range(engine.steps, config.task.samples.steps):
        lr = engine.optimizer.param_groups[0]["lr"] if engine.optimizer else None
        start = time.perf_counter()
        batches = next(stream)
        comm.ledger.clear()  # or it would list every message of a long run
        result = engine.step(batches)
        seconds = time.perf_counter() - start
        if training.scheduler is not None:
            training.scheduler.step()
        if training.sent is None:
            phases = comm.ledger.sent_by_phase()
            left_out = (*UNPREDICTED, *unpredicted(training.job, engine))
            training.sent = sum(size for phase, size in phases.items() if phase not in left_out)
            if len(comm.ledger) == len(entries := comm.ledger.entries):
                training.messages = totals(entries, left_out)
            training.crossed = comm.ledger.sent_over(comm.mesh.crossing, without=left_out)
        if config.course.verify:  # it keeps the losses of all steps
            training.recorder.step(result)
        bytes_held = engine.placed.bytes_held()
        line = {
            "step": step + 1,
            "loss": result.loss,
            "lr": lr,
            "tokens": result.count,
            "seconds": seconds,
            "bytes_sent": comm.ledger.sent,
            **({"bytes_across_hosts": comm.ledger.sent_over(comm.mesh.crossing)} if comm.mesh.hosts > 1 else {}),
            "bytes_held": sum(bytes_held[kind] for kind in STATES),
            "grad_norm": result.grad_norm,
            **({} if engine.reducer.loss_scale is None else {"loss_scale": engine.reducer.scale}),
            **({} if engine.reducer.loss_scale is None and result.made else {"made": result.made}),
            "peak_memory": peak_memory(comm.device),
        }
        last, eval_every = step + 1 == config.task.samples.steps, config.course.eval_every
        if held_out and (last or (eval_every and (step + 1) % eval_every == 0)):
            line |= _evaluate(engine, held_out)
        yield line
        training.stopped = None if last else result.stop
        due = (step + 1) % (config.output.save_every or 1) == 0
        if training.saver is not None and (last or training.stopped or due):
            training.saver.save(extra_of(config, training.job, training.scheduler, training.layouts))
        if training.stopped:
            return


def _tell_stop(training: Training) -> int:
    """Shows the step after which a run stopped by request, and how to go on; returns the exit code."""
    config, step = training.config, training.engine.steps
    rank, number = training.stopped or (0, 0)
    saved = "nothing was saved, because there is no --save-every"
    if training.saver is not None:
        saved = f"saved in {training.saver.wait()}; the same command with --resume auto goes on from there"
    if not training.comm.rank:
        name = signal.Signals(number).name
        say(f"plait: {name} (on rank {rank}): stopped after step {step} of {config.task.samples.steps}; {saved}\n")
    return 128 + number


def _evaluate(engine: Engine, steps: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Returns the mean loss over all held-out samples; all ranks call it together."""
    start = time.perf_counter()
    results = [engine.evaluate(batches) for batches in steps]
    count = sum(result.count for result in results)
    loss = math.fsum(result.loss * result.count for result in results) / count
    return {"eval_loss": loss, "eval_tokens": count, "eval_seconds": time.perf_counter() - start}


def _bytes_per_rank(training: Training, entries: Sequence[Entry]) -> list[RankBytes]:
    """Returns the predicted and measured bytes of every rank, on every rank; ``entries`` are predicted messages."""
    comm, engine = training.comm, training.engine
    measured, crossing = engine.placed.bytes_held(), comm.mesh.crossing
    states = training.config.task.optimizer_row.states
    predicted = held(engine.placed.layouts(), comm.mesh, engine.placed.strategy, comm.rank, states)
    mine = [
        *astuple(predicted),
        *(measured[kind] for kind in STATES),
        sum(entry.sent for entry in entries),
        training.sent or 0,
        sum(entry.sent for entry in entries if any(axis in crossing for axis in entry.axes)),
        training.crossed,
        measured["gathered_peak"],
    ]
    rows = gather_ints(comm, mine, AXES, Note("bytes"))
    return [RankBytes(r, Held(*row[:3]), Held(*row[3:6]), *row[6:]) for r, row in enumerate(rows)]


def _compare(training: Training, console: Console) -> bool | None:
    """Trains again as one process that adds in this layout's order; True if every number is the same (on rank 0)."""
    config = training.config
    records = collect_records(training.comm, training.recorder.finish(training.engine))
    if records is None:
        return None
    console.print("training again as one process ...")
    one_layout = len(training.layouts) == 1
    within = asked(config.machine.parsed_mesh, config.task, config.dtypes.computed, one_layout=one_layout)
    with working():
        whole = replay(training.job, config, records, keep_links=False)
    findings = against_tree(records, whole.since(training.first), within)
    steps = config.task.samples.steps
    title = f"on {training.comm.mesh.size} ranks against one process"
    if training.first:
        title = f"steps {training.first + 1} to {steps} {title}, which was not interrupted"
    else:
        title = f"{steps} steps {title}"
    console.print(findings_table(title, findings))
    same, bitwise = all(f.equal for f in findings), within == BITWISE
    equal = "bitwise: the same run as one process" if bitwise else "equal: one process's run, within the tolerances"
    console.print(f"verdict: {equal if same else 'DIFFERENT from the one-process run'}")
    if not same:
        console.print("plait verify, with this run's flags and few --steps, names the first wrong tensor")
    return same
