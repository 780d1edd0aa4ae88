"""The flags of a training job: a model, its data and its optimizer, with the values that follow from them.

network: ModelConfig       (families) ─┐
samples: DataConfig                    ├─► JobConfig ──► family, sizes, dtypes ──► Job (job)
update:  OptimizerConfig  (optimizer) ─┘
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch

from plait.run.job.families import Family, ModelConfig, find_family, for_text, own_family
from plait.run.job.optimizer import OptimizerConfig, OptimizerRow, find_optimizer
from plait.run.job.own import UserJob, load_job
from plait.run.job.sections import Sections
from plait.table.cells import LONG, TABLE, Strategy
from plait.table.precision import LossScale, Precision


@dataclass(frozen=True)
class DataConfig:
    """The data to read, its order, and its amount."""

    steps: int = 60
    """Steps of the optimizer."""
    batch: int = 16
    """Samples of one step, over all ranks and microbatches."""
    epochs: Annotated[
        int | None,
        for_text("Passes over the data, instead of steps; the last step of each has the samples that are left"),
    ] = None
    pack: Annotated[bool, for_text("Pack documents of the text into rows, with attention inside each only")] = False
    ragged: bool = False
    """Samples with different token counts, so that ranks and microbatches differ too."""
    data: str | None = None
    """A file or folder of text, of .jsonl with a "text" a line, or of tokens (.npy, .bin). None: the
    source of Python's standard library."""
    seed: int = 0
    """Decides initial weights, data order and dropout."""


class Dtypes(NamedTuple):
    """The dtypes of a run."""

    precision: Precision
    """The dtypes of the row, and the first loss scale."""
    computed: torch.dtype
    """The dtype of the computation."""
    stored: torch.dtype
    """The dtype in which the model is built: that of the master weights, if there are any."""


@dataclass(frozen=True, init=False)
class JobConfig(Sections):
    """The settings of a training job, without a layout.  A wrong setting raises ValueError when its value is made."""

    network: ModelConfig = ModelConfig()
    samples: DataConfig = DataConfig()
    update: OptimizerConfig = OptimizerConfig()

    @cached_property
    def family(self) -> Family:
        """The row of the model, or the row made from the user's job."""
        job = self.network.job
        if job is None:
            return find_family(self.network.model)
        return own_family(job if isinstance(job, UserJob) else load_job(job), self.samples.seed)

    @property
    def title(self) -> str:
        """The model in one word."""
        return self.network.model if self.network.job is None else str(self.network.job)

    @cached_property
    def sizes(self) -> Any:
        """The sizes of the model, or the folder that contains them."""
        return self.family.sizes(self.network)

    @cached_property
    def optimizer_row(self) -> OptimizerRow:
        return self.family.optimizer or find_optimizer(self.update.optimizer)

    def in_dtype(self, row: Strategy) -> Strategy:
        """Adds the dtypes of ``dtype`` to the row's cells.  Raises ValueError if the row already has dtypes."""
        dtype = self.network.dtype
        if dtype != "fp32" and (row.params.dtype or row.grads.dtype or row.optim.dtype):
            raise ValueError(f"strategy {row.name!r} names dtypes itself ({row.row()}), beside dtype {dtype}")
        name, _, mixed = dtype.partition("-")
        return row.mixed(name) if mixed else row

    @cached_property
    def dtypes(self) -> Dtypes:
        """The dtypes of the single process.  A row written by hand may have others: ``dtypes_in``."""
        return self.dtypes_in(self.in_dtype(TABLE["ddp"]))

    def dtypes_in(self, row: Strategy) -> Dtypes:
        """The dtypes under a row.  The first loss scale is the default for fp16, unless the config sets one."""
        dtype, scale = self.network.dtype, self.update.loss_scale
        if scale is None and (row.params.dtype or dtype) == "fp16":
            scale = LossScale().scale
        precision = Precision.of(row, scale)
        computed = precision.params.dtype or dtype
        return Dtypes(
            precision, *(getattr(torch, LONG[name]) for name in (computed, precision.optim.dtype or computed))
        )


@dataclass(frozen=True, init=False)
class TaskConfig(Sections):
    """Base of the configs for commands that make a job."""

    task: JobConfig = JobConfig()
