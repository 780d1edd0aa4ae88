"""``plait train``: train a job under a layout, show what it costs and, on request, that it is the one-process run.

Every rank runs ``run_train``; rank 0 speaks.  Bytes held and sent are predicted from the table before the first step
and measured after the last; metrics go to ``metrics.jsonl``, one object a step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from plait.comm import Comm
from plait.config import TrainConfig
from plait.core.additions import additions
from plait.core.cells import Strategy, find_strategy
from plait.core.collectives import Note
from plait.core.mesh import AXES
from plait.engine import Engine
from plait.job import Job, layout_of, make_job
from plait.measure.gpu import GpuUtilisation
from plait.plan.memory import Held, held
from plait.report.training import RankBytes, bytes_table, progress_line, spark
from plait.timeline import record_timeline, show_timeline, write_timeline
from plait.verify.compare import BITWISE, against_tree, summarise
from plait.verify.record import RankRecord, Recorder, collect_records, predict
from plait.verify.reference import run_reference
from plait.verify.run import asked, findings_table, write_json

STATES = {"adamw": 2, "adam": 2, "sgd": 1}
"""Numbers of a parameter's size that each optimizer of the command line keeps (SGD here has momentum)."""


class Metrics:
    """Writes ``metrics.jsonl``, one object a step, flushed: what was written before a crash stays."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "metrics.jsonl").open("w", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def run_train(config: TrainConfig, comm: Comm) -> int:
    """This rank's part of a training run; returns the exit code (1 where the comparison asked for fails)."""
    strategy = find_strategy(config.strategy)
    job = make_job(config)
    console = Console(quiet=comm.rank > 0, stderr=config.json == "-", highlight=False, soft_wrap=True)
    recorder = Recorder(comm, gradients=False)
    model = job.build()
    parameters = sum(p.numel() for p in model.parameters())  # before the engine cuts them
    engine = Engine(
        model,
        comm,
        optimizer=job.optimizer(model.parameters()),
        loss_fn=job.loss_fn,
        count_fn=job.count_fn,
        strategy=strategy,
        seed=config.seed,
        **layout_of(config, job, comm),
    )
    console.print(
        f"{config.model}, {parameters:,} parameters, {config.dtype}, {config.batch} samples a step, "
        f"microbatches per rank: {config.microbatches}"
    )
    console.print(f"{strategy}")
    console.print(f"mesh {comm.mesh}: {comm.mesh.size} ranks ({config.world} world)")
    if engine.pipeline.num_stages > 1:
        owner, first = engine.pipeline.owner, 0
        for stage, size in enumerate(engine.split):
            names = engine.links[first : first + size]
            first += size
            console.print(f"stage {stage} on pipe rank {owner[stage]}: {names[0]} .. {names[-1]} ({size} links)")
    metrics = Metrics(Path(config.out) if config.out and comm.rank == 0 else None)
    lines = []
    on_gpu = comm.device.type == "cuda"
    with GpuUtilisation(comm.device.index or 0) if on_gpu else nullcontext() as watched:
        for line in _steps(config, job, comm, engine, recorder.record, console):
            metrics.write(line)
            lines.append(line)
    metrics.close()
    ranks = _bytes_per_rank(config, job, comm, engine)
    recorded = record_timeline(engine)
    console.print(f"loss {lines[0]['loss']:.4f} -> {lines[-1]['loss']:.4f}  {spark([line['loss'] for line in lines])}")
    rate = statistics.median(line["tokens"] / line["seconds"] for line in lines)
    unit = "tokens" if config.model != "mlp" else "samples"
    console.print(f"{rate:,.0f} {unit}/s (median over steps, all ranks)")
    console.print(bytes_table(ranks))
    if recorded is not None and engine.pipeline.num_stages > 1:
        show_timeline(recorded, console)
    verdict = None
    if config.verify:
        records = collect_records(comm, recorder.finish(engine))
        if records is not None:
            verdict = _compare(config, job, comm, strategy, records, console)
    if comm.rank > 0:
        return 0
    summary = {
        "config": asdict(config),
        "parameters": parameters,
        "steps": len(lines),
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        f"{unit}_per_second": rate,
        "bytes_per_rank": [asdict(r) for r in ranks],
        "stages": engine.split,
        "busy_share_per_rank": recorded.busy if recorded else None,
        "gpu_busy_share": watched.share if watched else None,
        "idle_share": dict(zip(("measured", "simulated"), recorded.idle, strict=True)) if recorded else None,
        "equal_to_one_process": verdict,
    }
    if config.out:
        if recorded is not None:
            write_timeline(recorded, Path(config.out), f"{config.model}, {strategy.name} on {comm.mesh}")
        write_json(str(Path(config.out) / "summary.json"), summary)
        console.print(f"metrics, summary, timeline.svg and trace.json (for Perfetto) in {config.out}")
    if config.json:
        write_json(config.json, summary | {"metrics": lines})
    return 1 if verdict is False else 0


def _steps(config: TrainConfig, job: Job, comm: Comm, engine: Engine, record: RankRecord, console: Console) -> Any:
    """Train; one dict a step."""
    ranks = comm.mesh.data_size
    unit = "tokens" if config.model != "mlp" else "samples"
    times: list[float] = []
    for step in range(config.steps):
        start = time.perf_counter()
        batches = job.microbatches(step, record.data_rank, ranks, config.microbatches, str(comm.device))
        mark = comm.ledger.sent
        result = engine.step(batches)
        seconds = time.perf_counter() - start
        times.append(seconds)
        record.losses.append(result.loss)
        record.local_losses.append(result.local_losses)
        record.norms.append(result.grad_norm)
        bytes_held = engine.bytes_held()
        if step == 0 or (step + 1) % config.log_every == 0 or step + 1 == config.steps:
            typical = statistics.median(times[-20:])
            left = typical * (config.steps - step - 1)
            rate = result.count / typical
            console.print(progress_line(step + 1, config.steps, result.loss, rate, unit, result.grad_norm, left))
        yield {
            "step": step + 1,
            "loss": result.loss,
            "tokens": result.count,
            "seconds": seconds,
            "bytes_sent": comm.ledger.sent - mark,
            "bytes_held": bytes_held["params"] + bytes_held["grads"] + bytes_held["optimizer"],
            "grad_norm": result.grad_norm,
        }


def _bytes_per_rank(config: TrainConfig, job: Job, comm: Comm, engine: Engine) -> list[RankBytes]:
    """Every rank's bytes, as it predicts and measures them, on every rank."""
    kept, rank = engine.bytes_held(), comm.rank
    ahead = held(engine.layouts(), comm.mesh, engine.strategy, rank, STATES[config.optimizer])
    batches = job.microbatches(0, comm.mesh.data_rank(rank), comm.mesh.data_size, config.microbatches)
    mine = [
        *(ahead.params, ahead.grads, ahead.optimizer),
        *(kept["params"], kept["grads"], kept["optimizer"]),
        sum(entry.sent for entry in predict(engine, job, batches)),
        sum(e.sent for e in comm.ledger.entries if e.note.phase not in ("setup", "state")) // config.steps,
        kept["gathered_peak"],
        engine.peak_open,
    ]
    every = torch.empty(len(mine) * comm.mesh.size, dtype=torch.int64, device=comm.device)
    comm.all_gather(every, torch.tensor(mine, dtype=torch.int64, device=comm.device), AXES, note=Note("bytes")).wait()
    rows = every.view(-1, len(mine)).tolist()
    return [RankBytes(r, Held(*row[:3]), Held(*row[3:6]), *row[6:]) for r, row in enumerate(rows)]


def _compare(
    config: TrainConfig,
    job: Job,
    comm: Comm,
    strategy: Strategy,
    records: Sequence[RankRecord],
    console: Console,
) -> bool:
    """Train again as one process that adds in this layout's order; whether every number is the same."""
    console.print("training again as one process ...")
    bitwise = asked(config) == BITWISE
    pieces = [r.norm_pieces for r in sorted(records, key=lambda r: r.rank)] if bitwise else None
    reference = run_reference(
        job,
        comm.mesh,
        config.microbatches,
        additions(strategy),
        config.steps,
        clip=config.clip,
        norm_pieces=pieces,
        keep_gradients=False,
        ties=records[0].ties,
    )
    findings = against_tree(records, reference, asked(config))
    console.print(
        findings_table(f"{config.steps} steps on {comm.mesh.size} ranks against one process", summarise(findings))
    )
    same = all(f.equal for f in findings)
    equal = "bitwise: the same run as one process" if bitwise else "equal: one process's run, within the tolerances"
    words = equal if same else "DIFFERENT from the one-process run"
    console.print(f"verdict: {words}")
    return same
