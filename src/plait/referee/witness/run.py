"""``plait verify --engine``: runs a job under another engine and a witness, then judges it.

every rank     the whole model ──► adapter ──► steps under plait.witness ──► a folder
rank 0         judge(job, folder)
"""

import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from plait.comm.base import NO_NOTE, Comm
from plait.comm.texts import broadcast_text, check_together
from plait.referee.witness.engines import Driven, check_engine, find_adapter
from plait.referee.witness.judge import judge
from plait.referee.witness.judgement import Judgement
from plait.referee.witness.record import witness
from plait.referee.witness.replay import check_replayable
from plait.run.config.layout import LayoutConfig
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import Job, build_model, make_job
from plait.run.job.sections import flags
from plait.step import Engine
from plait.step.step import whole_count
from plait.table.mesh import AXES
from plait.zero.state.init import materialise


def with_engine(config: VerifyConfig) -> VerifyConfig:
    """A config whose ranks are processes, as other engines need; ValueError for settings that do not fit an engine."""
    assert config.comparison.engine is not None
    if config.comparison.matrix is not None:
        raise ValueError(
            f"engine {config.comparison.engine!r} beside matrix, which is of plait's layouts: leave one of them out"
        )
    if config.task.network.dtype not in ("fp32", "fp64"):
        raise ValueError(
            f"dtype {config.task.network.dtype} beside engine: give fp32 or fp64, in which a difference is no rounding"
        )
    given, unsaid = flags(config), flags(VerifyConfig())
    for name in ours():
        if given[name] != unsaid[name]:
            raise ValueError(f"{name} {given[name]!r} beside engine, which has its own ways: leave one of them out")
    check_replayable(build_model(config.task, config.dtypes))
    check_engine(config.comparison.engine, config.machine.parsed_mesh)
    find_adapter(config.comparison.engine)
    return config.with_flags(world="process", device="cpu")


def ours() -> list[str]:
    """The names of the settings for plait's own engine, and for its comparisons."""
    layout = [field.name for field in fields(LayoutConfig) if field.name != "microbatches"]
    return [*layout, "compile", "locate", "spread", "tensors"]


def run_engine(config: VerifyConfig, comm: Comm) -> Judgement | None:
    """Runs this rank's part; returns the judgement on rank 0, None elsewhere."""
    job = make_job(config.task, config.dtypes)
    folder = Path(broadcast_text(comm, tempfile.mkdtemp(prefix="plait-witness-") if not comm.rank else "", NO_NOTE))
    try:
        drive(job, config, comm, folder)
        check_together(comm, None, AXES)
        return judge(job, folder, clip=config.task.update.clip, steps=job.steps) if not comm.rank else None
    finally:
        if not comm.rank:
            shutil.rmtree(folder, ignore_errors=True)


def _driven(engine: str, made: Any) -> Driven:
    """Checks the result of an adapter; ValueError with the fix if it is wrong."""
    parts = made if isinstance(made, tuple) else ()
    right = 3 <= len(parts) <= len(Driven._fields) and isinstance(parts[0], nn.Module | Engine)
    if not (right and hasattr(parts[1], "param_groups") and (callable(parts[2]) or callable(parts[-1]))):
        kinds = ", ".join(type(part).__name__ for part in parts) if parts else type(made).__name__
        raise ValueError(
            f"--engine {engine} returned ({kinds}): return the model, its optimizer and a function that makes a step, "
            f"step(batches, count, clip)"
        )
    return Driven(*parts)


def drive(job: Job, config: VerifyConfig, comm: Comm, folder: Path) -> None:
    """Trains a job under an engine, witnessed in a folder."""
    assert config.comparison.engine is not None
    model = job.build()
    materialise(model, job.seed, comm.device, job.weights)
    made = _driven(config.comparison.engine, find_adapter(config.comparison.engine)(job, model, comm))
    where, parts = comm.data_rank, config.layout.microbatches
    steps = [job.microbatches(step, where, comm.mesh.data_size, parts) for step in range(job.steps)]
    schedule = job.scheduler(made.optimizer) if job.scheduler and not made.train else None
    given = {"steps": job.steps, "rank": comm.rank, "ranks": comm.mesh.size, **made.told}
    with witness(made.model, made.optimizer, folder, **given):
        if made.train is not None:
            made.train(steps, config.task.update.clip)
        for step, batches in enumerate(steps if made.train is None else []):
            (whole,) = job.microbatches(step, 0, 1, 1)
            assert made.step is not None
            made.step(batches, whole_count(job.count_fn(whole)), config.task.update.clip)
            if schedule:
                schedule.step()
