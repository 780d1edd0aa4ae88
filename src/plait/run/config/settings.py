"""Every flag of ``plait train`` and ``plait verify`` as one frozen value, and what follows from it.

defaults  <-  --config FILE.toml  <-  flags of the command line

MachineConfig   the ranks                 machine.py ─┐
LayoutConfig    the model on them          layout.py  ├─► RunConfig ──► parallelism ──► Engine
JobConfig       what is trained        run/job/config.py ─┘           └───► Job
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import tyro

from plait.comm import Comm
from plait.run.config.file import FileConfig
from plait.run.config.layout import LayoutConfig, names_a_file, read_schedule
from plait.run.config.machine import Device, MachineConfig, World
from plait.run.job.config import JobConfig
from plait.run.job.families import OF_THE_FOLDER, stock_families
from plait.run.job.job import Job
from plait.schedule.pipeline import Pipeline
from plait.table.cells import Strategy, find_strategy
from plait.table.parallelism import Parallelism

Section = TypeVar("Section")
AnyJob = TypeVar("AnyJob", bound=JobConfig)


@dataclass(frozen=True)
class RunConfig(JobConfig, LayoutConfig, MachineConfig, FileConfig):
    """What training and verifying have in common; a wrong setting raises ValueError where its value is made."""

    @cached_property
    def row(self) -> Strategy:
        """The strategy, with the dtypes and the device that other settings give its cells."""
        row = self.in_dtype(find_strategy(self.strategy))
        return row.offloaded() if self.offload else row

    @cached_property
    def parallelism(self) -> Parallelism:
        """The layout as the engine takes it; a split that is to be measured is None here."""
        given = {field.name: getattr(self, field.name) for field in fields(Parallelism) if hasattr(self, field.name)}
        given |= {"strategy": self.row, "split": self.sizes_of_stages}
        if self.schedule is not None and names_a_file(self.schedule):
            given["schedule"] = read_schedule(self.schedule)
        return Parallelism(**given)

    @cached_property
    def pipeline(self) -> Pipeline:
        """How the ranks of the pipe axis share the work."""
        return Pipeline.of(self.parallelism, self.parsed_mesh.pipe)

    def measured(self, job: Job, comm: Comm) -> Parallelism:
        """``parallelism``, with the split that was to be measured; all ranks call it together."""
        if self.split != "measured":
            return self.parallelism
        sizes = job.measured_split(comm, self.pipeline, self.microbatches, self.recompute)
        return replace(self.parallelism, split=sizes)


def with_job(config: AnyJob) -> AnyJob:
    """A config whose job is the user's own, with what that decides: the samples of a step and the learning rate.
    ValueError for another setting of what the job decides; a file that a run of the job has written says the same."""
    if config.job is None:
        return config
    family, defaults = config.family, type(config)()
    decided = {"model": f"model {' '.join(OF_THE_FOLDER)}", "data": "length data ragged batch"}
    if family.optimizer is not None:
        decided["optimizer"] = "optimizer lr weight_decay"
    if getattr(config, "workers", 0):
        raise ValueError("workers beside job: a job's own batches are made by the rank, so leave workers out")
    made: dict[str, Any] = {"batch": family.samples or config.batch, "lr": family.rate or config.lr}
    for what, name in ((what, name) for what, names in decided.items() for name in names.split()):
        unsaid = getattr(defaults, name), getattr(RunConfig, name)
        if (given := getattr(config, name)) not in (*unsaid, made.get(name, unsaid[0])):
            raise ValueError(f"{name} {given} beside job, which has the {what}: leave one of them out")
    return replace(config, **made)


@dataclass(frozen=True)
class OutputConfig:
    """Where a run writes, and from where it goes on."""

    out: str | None = None
    """A folder for metrics.jsonl (one object a step), the summary, and the timeline of a step (SVG, Perfetto)."""
    overwrite: bool = False
    """Replace what an earlier run has left in the folder out."""
    save_every: int | None = None
    """Steps between two checkpoints in the folder out; the last step has one too."""
    keep: int | None = None
    """How many checkpoints stay, the newest ones; None: all."""
    resume: str | None = None
    """Go on from a checkpoint, or the newest of a folder of them; auto: from the newest in out, if there is one."""
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
    """The project of Weights & Biases to which the metrics go as well."""


@dataclass(frozen=True)
class CourseConfig:
    """How a run proceeds: its checks, its evaluations, faults and ends."""

    verify: bool = False
    """At the end, train again as one process and compare."""
    log_every: int = 10
    """Steps between two lines on the screen."""
    eval_every: int | None = None
    """Steps between two losses on the held-out text; the last step has one too. 0: only that one. None: none."""
    eval_steps: int | None = 20
    """Batches of one evaluation at most; None: all of the held-out text."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """A step whose loss or gradient is inf or NaN on any rank ends the run, or is left out (as always in fp16)."""
    check_drift: int = 100
    """Steps between two checks that ranks which hold the same state have the same bits; 0: none."""
    workers: int = 0
    """Processes of each rank that make the batches of the coming steps; 0: the rank makes them itself."""
    restarts: int = 0
    """How often ranks that died, failed or stood still are started again, from the newest checkpoint."""
    grace: float = 60.0
    """Seconds to end behind the step, with a checkpoint, after SIGTERM, SIGINT, SIGHUP or SIGUSR1; 0: at once."""
    inject: tuple[str, ...] = ()
    """Faults that are to happen, as in: --inject kill@rank=2,step=20."""


@dataclass(frozen=True)
class TrainConfig(RunConfig, CourseConfig, OutputConfig):
    """Train a model on a mesh; show its loss, its speed and its bytes, predicted and measured."""


@dataclass(frozen=True)
class ComparisonConfig:
    """Which layouts are compared, and how."""

    matrix: Literal["small", "full"] | None = None
    """Go through many layouts instead of one: every two settings together, on up to 8 ranks (small) or 16 (full)."""
    engine: str | None = None
    """Hold an engine of others against the single process: ddp, fsdp2, zero-redundancy, dtensor, torch-pipelining,
    accelerate, or an adapter of your own as FILE.py:NAME."""
    grid: bool = False
    """With engine: go through all smaller layouts as well, and say how a factor grows with their sizes."""
    tensors: bool = False
    """Print every tensor that was compared, not only a line per kind."""
    locate: bool = True
    """Where something is different, run the layout again, recorded, and name the first wrong tensor."""
    spread: int | None = None
    """How many honest runs (other orders of additions, last bits perturbed) the layout is held beside: none where bits
    are equal, 8 where 16 bits meet a tensor axis."""


@dataclass(frozen=True)
class VerifyConfig(RunConfig, ComparisonConfig):
    """Hold a layout against the single process: losses, every gradient, norm, parameters, optimizer state.

    Exit code 0: equal, 1: not equal, 2: bad input.
    """

    mesh: str = "shard=2"
    steps: int = 5
    width: int = 64
    batch: int = 12
    length: int = 32
    ragged: bool = True
    world: World = "thread"
    device: Device = "cpu"


def section(config: Any, kind: type[Section]) -> Section:
    """One section of a config, as a value of its own: ``section(config, JobConfig)``."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(kind)})  # type: ignore[arg-type]
