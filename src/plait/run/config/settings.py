"""Every flag of ``plait train`` and ``plait verify`` as one frozen value, and the values that follow from it.

defaults  <-  --config FILE.toml  <-  flags of the command line

machine: MachineConfig   the ranks                 machine.py ─┐
layout:  LayoutConfig    the model on them          layout.py  ├─► RunConfig ──► parallelism ──► Engine
task:    JobConfig       the job to train       run/job/config.py ─┘           └───► Job
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import tyro

from plait.run.config.file import FileConfig
from plait.run.config.layout import LayoutConfig, names_a_file, read_schedule
from plait.run.config.machine import MachineConfig
from plait.run.job.config import Dtypes, JobConfig, TaskConfig
from plait.run.job.families import OF_THE_FOLDER, stock_families
from plait.run.job.sections import flags
from plait.schedule.pipeline import Pipeline
from plait.table.cells import Strategy, find_strategy
from plait.table.parallelism import Parallelism

AnyJob = TypeVar("AnyJob", bound=TaskConfig)


@dataclass(frozen=True, init=False)
class RunConfig(TaskConfig):
    """Settings that training and verifying share.  A wrong setting raises ValueError when its value is made."""

    layout: LayoutConfig = LayoutConfig()
    machine: MachineConfig = MachineConfig()
    files: FileConfig = FileConfig()

    @cached_property
    def row(self) -> Strategy:
        """The strategy, with the dtypes and the device that other settings give its cells."""
        row = self.task.in_dtype(find_strategy(self.layout.strategy))
        return row.offloaded() if self.layout.offload else row

    @cached_property
    def dtypes(self) -> Dtypes:
        return self.task.dtypes_in(self.row)

    @cached_property
    def parallelism(self) -> Parallelism:
        """The layout for the engine."""
        names = {field.name for field in fields(Parallelism)}
        given = {name: value for name, value in flags(self).items() if name in names}
        given |= {"strategy": self.row, "split": self.layout.sizes_of_stages}
        if self.layout.schedule is not None and names_a_file(self.layout.schedule):
            given["schedule"] = read_schedule(self.layout.schedule)
        return Parallelism(**given)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline: distributes the work over the ranks of the pipe axis."""
        return Pipeline.of(self.parallelism, self.machine.parsed_mesh.pipe)


def with_job(config: AnyJob) -> AnyJob:
    """Completes the config of a user's job with the settings that the job decides: samples of a step, learning rate.
    Raises ValueError if the config sets other values.  The config file of an earlier run of the job has the same."""
    task, given = config.task, flags(config)
    if task.network.job is None:
        return config
    family, unsaid = task.family, (flags(type(config)()), flags(JobConfig()))
    decided = {"model": f"model {' '.join(OF_THE_FOLDER)}", "data": "length data ragged batch"}
    if family.optimizer is not None:
        decided["optimizer"] = "optimizer lr weight_decay"
    if given.get("workers"):
        raise ValueError("workers beside job: a job's own batches are made by the rank, so leave workers out")
    made: dict[str, Any] = {"batch": family.samples or task.samples.batch, "lr": family.rate or task.update.lr}
    for what, name in ((what, name) for what, names in decided.items() for name in names.split()):
        if given[name] not in (*(one[name] for one in unsaid), made.get(name, unsaid[0][name])):
            raise ValueError(f"{name} {given[name]} beside job, which has the {what}: leave one of them out")
    return config.with_flags(**made)


@dataclass(frozen=True)
class OutputConfig:
    """The places that a run writes to, and continues from."""

    out: str | None = None
    """A folder for metrics.jsonl (one object a step), the summary, report.html and one step's trace for Perfetto."""
    cluster: str | None = None
    """A file that describes this machine (plait doctor --calibrate): the report then has MFU and the planner's view."""
    overwrite: bool = False
    """Replace the files of an earlier run in the folder out."""
    save_every: int | None = None
    """Steps between two checkpoints in the folder out; the last step has one too."""
    keep: int | None = None
    """Number of checkpoints to keep, the newest ones; None: all."""
    resume: str | None = None
    """Continue from a checkpoint, or the newest in a folder; auto: from the newest in out, if there is one."""
    change: tuple[str, ...] = ()
    """Settings that may differ from those of the run that is resumed, by name, as in: --change lr steps"""
    export: Annotated[
        str | None,
        tyro.conf.arg(
            help=lambda: f"A new folder for the trained model, as transformers loads it ({stock_families()})."
        ),
    ] = None
    tensorboard: bool = False
    """Write TensorBoard's event files into the folder out as well."""
    wandb: str | None = None
    """Also send the metrics to this Weights & Biases project."""


@dataclass(frozen=True)
class CourseConfig:
    """The course of a run: its checks, its evaluations, its faults and its end."""

    verify: bool = False
    """At the end, train again as one process and compare."""
    log_every: int = 10
    """Steps between two lines on the screen."""
    eval_every: int | None = None
    """Steps between two losses on the held-out text; the last step has one too. 0: only the last. None: none."""
    eval_steps: int | None = 20
    """Batches of one evaluation at most; None: all of the held-out text."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """A step whose loss or gradient is inf or NaN on any rank ends the run, or is skipped (as always in fp16)."""
    check_drift: int = 100
    """Steps between two checks that replicated state is bitwise identical on all its ranks; 0: none."""
    workers: int = 0
    """Worker processes of each rank that make the batches of the next steps; 0: the rank makes them itself."""
    restarts: int = 0
    """Number of times to restart ranks that died, failed or stood still, from the newest checkpoint."""
    grace: float = 60.0
    """Seconds to finish the step and save a checkpoint after SIGTERM, SIGINT, SIGHUP or SIGUSR1; 0: end at once."""
    inject: tuple[str, ...] = ()
    """Faults to inject, as in: --inject kill@rank=2,step=20."""


@dataclass(frozen=True, init=False)
class TrainConfig(RunConfig):
    """Train a model on a mesh; show its loss, its speed and its bytes, predicted and measured."""

    course: CourseConfig = CourseConfig()
    output: OutputConfig = OutputConfig()


@dataclass(frozen=True)
class ComparisonConfig:
    """The layouts to compare, and how to compare them."""

    matrix: Literal["small", "full"] | None = None
    """Go through many layouts instead of one: every two settings together, on up to 8 ranks (small) or 16 (full)."""
    engine: str | None = None
    """Compare another engine with the single process: plait, ddp, fsdp2, or an adapter as
    FILE.py:NAME (examples/engines.py)."""
    tensors: bool = False
    """Print a line for every compared tensor, not only one per kind."""
    locate: bool = True
    """On a difference, run the layout again, record it, and name the first wrong tensor."""
    probe_token: bool = False
    """Change one token at a time and list the positions whose outputs move: none before it, of another document or
    sample. Nothing is trained."""
    spread: int | None = None
    """Number of honest runs (other orders of additions, last bits perturbed) to compare the layout with; None: 0 if the
    bits must be equal, 8 for 16 bits with a tensor axis."""


@dataclass(frozen=True, init=False)
class VerifyConfig(RunConfig):
    """Compare a layout with the single process: losses, every gradient, norm, parameters, optimizer state.

    Exit code 0: equal, 1: not equal, 2: bad input.
    """

    task: JobConfig = JobConfig(steps=5, width=64, batch=12, length=32, ragged=True)
    machine: MachineConfig = MachineConfig(mesh="shard=2", world="thread", device="cpu")
    comparison: ComparisonConfig = ComparisonConfig()
