"""The flags of a training job: a model, its data and its optimizer, with the values that follow from them.

ModelConfig (families) ─┐
DataConfig              ├─► JobConfig ──► family, sizes, precision ──► Job (job)
OptimizerConfig         ┘
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch

from plait.run.job.families import Family, ModelConfig, find_family, for_text, own_family
from plait.run.job.optimizer import OptimizerConfig, OptimizerRow, find_optimizer
from plait.run.job.own import UserJob, load_job
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
    """A file or folder of text, of .jsonl with a "text" a line, or of tokens (.npy, .bin, .safetensors). None: the
    source of Python's standard library."""
    seed: int = 0
    """Decides initial weights, data order and dropout."""


@dataclass(frozen=True)
class JobConfig(ModelConfig, DataConfig, OptimizerConfig):
    """The settings of a training job, without a layout.  A wrong setting raises ValueError where its value is made."""

    @cached_property
    def family(self) -> Family:
        """The row of the model, or the row made from the user's job."""
        if self.job is None:
            return find_family(self.model)
        return own_family(self.job if isinstance(self.job, UserJob) else load_job(self.job))

    @property
    def title(self) -> str:
        """The model in one word."""
        return self.model if self.job is None else str(self.job)

    @cached_property
    def sizes(self) -> Any:
        """The sizes of the model, or the folder that contains them."""
        return self.family.sizes(self)

    @cached_property
    def optimizer_row(self) -> OptimizerRow:
        """The row of the optimizer."""
        return self.family.optimizer or find_optimizer(self.optimizer)

    @cached_property
    def row(self) -> Strategy:
        """The row of the single process.  A ``RunConfig`` has its layout's row instead, which may have other dtypes."""
        return self.in_dtype(TABLE["ddp"])

    def in_dtype(self, row: Strategy) -> Strategy:
        """Adds the dtypes of ``dtype`` to the row's cells.  Raises ValueError if the row already has dtypes."""
        if self.dtype != "fp32" and (row.params.dtype or row.grads.dtype or row.optim.dtype):
            raise ValueError(f"strategy {row.name!r} says dtypes of its own ({row.row()}), beside dtype {self.dtype}")
        name, _, mixed = self.dtype.partition("-")
        return row.mixed(name) if mixed else row

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of the row, and the first loss scale: the default for fp16, unless the config sets one."""
        fp16 = (self.row.params.dtype or self.dtype) == "fp16"
        return Precision.of(self.row, LossScale().scale if self.loss_scale is None and fp16 else self.loss_scale)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return _named(self.precision.params.dtype or self.dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which the model is built: that of the master weights, if there are any."""
        return _named(self.precision.optim.dtype or self.precision.params.dtype or self.dtype)


def _named(dtype: str) -> torch.dtype:
    named: torch.dtype = getattr(torch, LONG[dtype])
    return named
