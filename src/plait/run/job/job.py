"""Makes a training job from a config: model, loss, data and optimizer.

A ``Job`` is the same for a layout on many ranks and for the single process that checks it, so it has neither mesh nor
strategy.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plait.anymodel.context import use_context_axis
from plait.anymodel.experts import use_expert_axis
from plait.anymodel.tensor import plan_of
from plait.comm import Comm
from plait.run.data.batches import Batches
from plait.run.data.corpus import Epochs
from plait.run.data.workers import StepDataset, StepStream
from plait.run.job.config import Dtypes, JobConfig
from plait.run.job.dataset import make_data
from plait.run.job.optimizer import make_optimizer, make_scheduler
from plait.step import Engine, empty_parameters
from plait.step.nonfinite import NonFinite
from plait.table.mesh import Mesh
from plait.table.parallelism import Parallelism
from plait.table.precision import AS_IT_COMES, Precision
from plait.zero.state.weights import Weights


@dataclass(frozen=True)
class Job:
    """One training job."""

    build: Callable[[], nn.Module]
    """Makes a model with its parameters on meta."""
    loss_fn: Callable[[nn.Module, Any], Tensor]
    count_fn: Callable[[Any], int]
    batches: Batches
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    """Builds a stock optimizer on parameters."""
    global_batch: int
    """Samples of a step."""
    dtype: torch.dtype
    seed: int
    leading: Callable[[Any], tuple[int, ...]]
    """The shape of a batch's activations without their last dim."""
    width: int
    """The last dim of the tensors between stages; 0: not known in advance."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Builds the learning-rate schedule on the optimizer; ``step()`` is called once a step, after the optimizer's."""
    held_out: Epochs | None = None
    """The part of the data that is never trained on; None: there is none."""
    precision: Precision = AS_IT_COMES
    """The dtypes of parameters, sums and the optimizer."""
    steps: int = 0
    """The steps of the whole run, also if they follow from epochs."""
    weights: Weights | None = None
    """Source of the model's initial values; None: they are drawn from the seed."""
    compile: bool = False
    """Compile the model's units."""
    one_stream: bool = True
    """The same as in ``Family``."""
    digest: Callable[[], str | None] = lambda: None
    """Digest of the data; None: the settings decide the data."""

    def engine(
        self,
        comm: Comm,
        parallelism: Parallelism,
        *,
        clip: float | None = None,
        nonfinite: NonFinite = "raise",
        listener: Callable[[str, Engine], None] | None = None,
    ) -> tuple[Engine, LRScheduler | None]:
        """Builds the engine for a layout on this rank, and the rate's schedule.  All ranks call it together."""
        model = use_axes(self.build(), comm.mesh)
        optimizer = self.optimizer(model.parameters())
        if comm.mesh.tensor > 1 and parallelism.tensor_plan is None:
            plan = plan_of(model, sequence=parallelism.sequence_parallel)
            parallelism = replace(parallelism, tensor_plan=plan)
        engine = Engine(
            model,
            comm,
            parallelism=parallelism,
            optimizer=optimizer,
            loss_fn=self.loss_fn,
            count_fn=self.count_fn,
            clip=clip,
            seed=self.seed,
            weights=self.weights,
            loss_scale=self.precision.loss_scale(),
            nonfinite=nonfinite,
            listener=listener,
        )
        return engine, self.scheduler(optimizer) if self.scheduler else None

    def stream(
        self,
        steps: range,
        data_rank: int,
        num_data_ranks: int,
        num_microbatches: int,
        device: str = "cpu",
        workers: int = 0,
    ) -> StepStream:
        """A data rank's microbatches of many steps, on the device.  ``workers`` make them ahead; ``with`` ends them."""
        dataset = StepDataset(self.batches, data_rank, num_data_ranks, num_microbatches, self.global_batch)
        return StepStream(dataset, steps, workers, device)

    def microbatches(
        self, step: int, data_rank: int, num_data_ranks: int, num_microbatches: int, device: str = "cpu"
    ) -> list[Any]:
        """A data rank's microbatches of one step."""
        return next(self.stream(range(step, step + 1), data_rank, num_data_ranks, num_microbatches, device))

    def eval_batches(
        self, data_rank: int, num_data_ranks: int, num_microbatches: int, device: str = "cpu"
    ) -> list[list[Any]]:
        """A data rank's microbatches of every step of an evaluation: the same number on all ranks.  Over all ranks they
        are the held-out samples, each once; some of the last step may be one sample without a loss."""
        assert self.held_out is not None
        dataset = StepDataset(self.held_out, data_rank, num_data_ranks, num_microbatches, self.global_batch)
        return list(StepStream(dataset, range(self.held_out.num_steps(self.global_batch)), device=device))


def use_axes(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Lets a model of transformers use the context and the expert axis of the mesh.  Other models do so themselves."""
    if type(model).__module__.startswith("transformers."):
        if mesh.context > 1:
            use_context_axis(model)
        if mesh.expert > 1:
            use_expert_axis(model)
    return model


def build_model(config: JobConfig, dtypes: Dtypes | None = None) -> nn.Module:
    """Builds the model that a config describes.  Its parameters are on meta unless it is the user's.

    Parameters are cast to the dtype, but not the buffers: in bf16 a rotary angle would be off by radians.
    """
    stored = (dtypes or config.dtypes).stored
    with nullcontext() if config.family.valued else empty_parameters():
        model = config.family.build(config.sizes)
    if config.family.valued and stored == torch.float64:
        model = model.double()  # also the buffers of a user's model, which lose no precision
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.itemsize > 1:  # frozen weights are stored in fp8
            parameter.data = parameter.data.to(stored)
    return model.train()


def make_job(config: JobConfig, dtypes: Dtypes | None = None) -> Job:
    """Makes the job that a config describes, with the dtypes of a layout's row, or of the single process.  ValueError
    if sizes or files do not fit together, or the text is missing or too short."""
    dtypes = dtypes or config.dtypes
    family, data = config.family, make_data(config, dtypes.computed)
    return Job(
        build=partial(build_model, config, dtypes),
        loss_fn=family.loss_fn,
        count_fn=family.count_fn,
        batches=data.batches,
        optimizer=family.optimizer.make if family.optimizer else partial(make_optimizer, config.update),
        global_batch=config.samples.batch,
        dtype=dtypes.computed,
        seed=config.samples.seed,
        leading=family.leading,
        one_stream=family.one_stream,
        width=config.sizes.width if family.one_tensor else 0,
        scheduler=partial(make_scheduler, config.update, data.steps),
        held_out=data.held_out,
        precision=dtypes.precision,
        steps=data.steps,
        weights=None if family.weights is None else family.weights(config.sizes, build_model(config, dtypes)),
        compile=config.network.compile,
        digest=data.digest,
    )
