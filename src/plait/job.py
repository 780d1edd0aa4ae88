"""What is trained, apart from how: model, loss, data and optimizer, made from a config.

A ``Job`` is the same for a layout on many ranks and for the single process it is held against; that is why neither
mesh nor strategy is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plait.checkpoint.huggingface import open_folder
from plait.comm import Comm
from plait.config import RunConfig
from plait.core.precision import AS_IT_COMES, Precision
from plait.data import Batches, Epochs, StepDataset, StepStream
from plait.dataset import make_data
from plait.engine import empty_parameters
from plait.engine.costs import agreed_costs
from plait.engine.links import chain_of
from plait.engine.stages import split_of
from plait.engine.weights import Weights
from plait.models import gpt, hf, mlp
from plait.models.pretrained import Pretrained
from plait.plan.balance import shortest_step
from plait.recipe import make_optimizer, make_scheduler
from plait.tensor.gemm import find_gemm
from plait.tensor.parallel import parallel_plan


@dataclass(frozen=True)
class Job:
    """One training job.

    ``build`` makes a model with its parameters on meta; ``optimizer`` builds a stock optimizer on parameters;
    ``global_batch`` is in samples.
    """

    build: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    count_fn: Callable[[Any], int]
    batches: Batches
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    global_batch: int
    dtype: torch.dtype
    seed: int
    leading: Callable[[Any], tuple[int, ...]]
    """The shape of a batch's activations without their last dim."""
    width: int
    """The last dim of what goes from stage to stage."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Builds the learning-rate schedule on the optimizer; ``step()`` is called once a step, after the optimizer's."""
    held_out: Epochs | None = None
    """The part of the data that is never trained on; None: there is none."""
    precision: Precision = AS_IT_COMES
    """In which dtypes parameters, sums and the optimizer work."""
    steps: int = 0
    """Steps of the whole run, which epochs make of the data."""
    weights: Weights | None = None
    """Where the model's initial values are read; None: they are drawn from the seed."""
    gemm: str = "torch"
    """Who multiplies the matrices of linear layers."""

    def microbatches(
        self, step: int, data_rank: int, num_data_ranks: int, num_microbatches: int, device: str = "cpu"
    ) -> list[Any]:
        """A data rank's microbatches of a step, on the device."""
        batches = self.batches.microbatches(step, data_rank, num_data_ranks, num_microbatches, self.global_batch)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]

    def stream(
        self,
        steps: range,
        data_rank: int,
        num_data_ranks: int,
        num_microbatches: int,
        device: str = "cpu",
        workers: int = 0,
    ) -> StepStream:
        """The same for many steps, one after the other; ``workers`` processes make them ahead.

        Leave it by ``with``, which ends the processes.
        """
        dataset = StepDataset(self.batches, data_rank, num_data_ranks, num_microbatches, self.global_batch)
        return StepStream(dataset, steps, workers, device)

    def eval_batches(
        self, data_rank: int, num_data_ranks: int, num_microbatches: int, device: str = "cpu"
    ) -> list[list[Any]]:
        """A data rank's microbatches of every step of an evaluation, on the device: equally many on all ranks.

        Over all ranks they are the held-out samples, each once, ``global_batch`` a step; of the last step's
        microbatches some may be one sample without a loss.

        Raises:
            ValueError: the job has no held-out data.
        """
        if self.held_out is None:
            raise ValueError("an evaluation needs held-out data, which mlp's regression has not: choose another model")
        place = (data_rank, num_data_ranks, num_microbatches, self.global_batch)
        steps = range(self.held_out.num_steps(self.global_batch))
        every = [self.held_out.microbatches(step, *place) for step in steps]
        return [[{name: t.to(device) for name, t in batch.items()} for batch in step] for step in every]


def build_model(config: RunConfig) -> nn.Module:
    """The model that a config describes, in its dtype, with its parameters on meta."""
    sizes = config.model_config
    with empty_parameters():
        if isinstance(sizes, mlp.MLPConfig):
            model: nn.Module = mlp.MLP(sizes)
        elif isinstance(sizes, Pretrained):
            model = sizes.build()
            open_folder(sizes.path, model).fill_buffers(model)
        else:
            model = hf.build(sizes) if isinstance(sizes, hf.HFConfig) else gpt.GPT(sizes)
    return _cast(model, config.stored_dtype).train()


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The parameters, and not the buffers: in bf16 a rotary angle would be off by radians."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def check_layout(config: RunConfig) -> None:
    """Refuses, before any rank starts, what the mesh cannot do to this model.

    Raises:
        ValueError: a folder whose files do not fit together, more stages than the model has links, heads that the
            tensor axis cannot share, and whatever else a tensor plan can get wrong; a gemm that this torch has not.
    """
    mesh, pipeline = config.parsed_mesh, config.pipeline
    find_gemm(config.gemm)
    if isinstance(config.model_config, Pretrained):
        make_job(config)
    if pipeline.num_stages > 1:
        split_of(chain_of(build_model(config)), pipeline.num_stages, config.sizes_of_stages)
    if mesh.tensor > 1:
        parallel = parallel_plan(build_model(config), mesh.tensor, sequence=config.sequence_parallel)
        if not parallel.cuts:
            raise ValueError(
                f"tensor={mesh.tensor}, but the plan cuts no parameter of this model: mlp needs 4 layers for its first "
                f"pair; give more layers, or leave the tensor axis out"
            )


def layout_of(config: RunConfig, job: Job, comm: Comm) -> dict[str, Any]:
    """The arguments of ``Engine`` that say how the model lies on the mesh; all ranks call it together."""
    pipeline, split = config.pipeline, config.sizes_of_stages
    if config.split == "measured":
        batch = job.microbatches(0, 0, comm.mesh.data_size, config.microbatches, str(comm.device))[0]
        samples = job.leading(batch)[0]
        model, gemm = _cast(job.build(), job.dtype), find_gemm(config.gemm)
        costs = agreed_costs(model, comm, job.loss_fn, batch, samples, recompute=config.recompute, gemm=gemm)
        split = shortest_step(pipeline.written(config.microbatches), *costs)
    return {
        "clip": config.clip,
        "weights": job.weights,
        "loss_scale": job.precision.loss_scale(),
        "prefetch": config.prefetch,
        "cut": config.cut,
        "sequence_parallel": config.sequence_parallel,
        "recompute": config.recompute,
        "gemm": config.gemm,
        "schedule": pipeline.order,
        "chunks": config.chunks,
        "hold": config.hold,
        "split": split,
    }


def make_job(config: RunConfig) -> Job:
    """The job that a config describes.

    Raises:
        ValueError: sizes or files that don't fit together, or a text that is missing or too short.
    """
    sizes = config.model_config
    folder = sizes if isinstance(sizes, Pretrained) else None
    if folder is not None and config.length > (longest := folder.max_length or config.length):
        raise ValueError(f"length is {config.length}, but the model in {folder.path!r} has {longest} positions")
    weights = None if folder is None else open_folder(folder.path, build_model(config))
    data = make_data(config) if folder is None else make_data(config, folder.encoder())
    config = replace(config, steps=data.steps)
    if isinstance(sizes, mlp.MLPConfig):
        loss_fn, count_fn = mlp.loss_sum, mlp.sample_count
    else:
        loss_fn = hf.loss_sum if isinstance(sizes, hf.HFConfig | Pretrained) else gpt.loss_sum
        count_fn = gpt.token_count

    def leading(batch: Any) -> tuple[int, ...]:
        return tuple(batch["tokens"].shape) if "tokens" in batch else (len(batch["x"]),)

    return Job(
        build=partial(build_model, config),
        loss_fn=loss_fn,
        count_fn=count_fn,
        batches=data.batches,
        optimizer=partial(make_optimizer, config),
        global_batch=config.batch,
        dtype=config.torch_dtype,
        seed=config.seed,
        leading=leading,
        width=config.width if folder is None else folder.width,
        scheduler=partial(make_scheduler, config),
        held_out=data.held_out,
        precision=Precision.of(config.row, config.first_scale),
        steps=data.steps,
        weights=weights,
        gemm=config.gemm,
    )
