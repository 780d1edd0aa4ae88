"""What is trained, apart from how: model, loss, data and optimizer, made from a config.

A ``Job`` is the same for a layout on many ranks and for the single process it is held against; that is why neither
mesh nor strategy is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from plait.comm import Comm
from plait.config import RunConfig
from plait.data import Batches, SyntheticRegression, TextBatches, load_text, split_text
from plait.engine import empty_parameters
from plait.engine.costs import agreed_costs
from plait.engine.links import chain_of
from plait.engine.stages import split_of
from plait.models import gpt, hf, mlp
from plait.plan.balance import shortest_step
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

    def microbatches(
        self, step: int, data_rank: int, num_data_ranks: int, num_microbatches: int, device: str = "cpu"
    ) -> list[Any]:
        """A data rank's microbatches of a step, on the device."""
        batches = self.batches.microbatches(step, data_rank, num_data_ranks, num_microbatches, self.global_batch)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


def build_model(config: RunConfig) -> nn.Module:
    """The model that a config describes, in its dtype, with its parameters on meta."""
    sizes = config.model_config
    with empty_parameters():
        if isinstance(sizes, mlp.MLPConfig):
            model: nn.Module = mlp.MLP(sizes)
        else:
            model = hf.build(sizes) if isinstance(sizes, hf.HFConfig) else gpt.GPT(sizes)
    for parameter in model.parameters():  # and not the buffers: in bf16, a rotary angle would be off by radians
        parameter.data = parameter.data.to(config.torch_dtype)
    return model.train()


def check_layout(config: RunConfig) -> None:
    """Refuses, before any rank starts, what the mesh cannot do to this model.

    Raises:
        ValueError: more stages than the model has links, heads that the tensor axis cannot share, and whatever else a
            tensor plan can get wrong.
    """
    mesh, pipeline = config.parsed_mesh, config.pipeline
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
        costs = agreed_costs(job.build(), comm, job.loss_fn, batch, samples)
        split = shortest_step(pipeline.written(config.microbatches), *costs)
    return {
        "clip": config.clip,
        "prefetch": config.prefetch,
        "cut": config.cut,
        "sequence_parallel": config.sequence_parallel,
        "schedule": pipeline.order,
        "chunks": config.chunks,
        "hold": config.hold,
        "split": split,
    }


def make_job(config: RunConfig) -> Job:
    """The job that a config describes.

    Raises:
        ValueError: sizes that don't fit, or a text that is missing or too short.
    """
    sizes = config.model_config
    batches: Batches
    if isinstance(sizes, mlp.MLPConfig):
        batches = SyntheticRegression(sizes.width, config.seed, ragged=config.ragged, dtype=config.torch_dtype)
        loss_fn, count_fn = mlp.loss_sum, mlp.sample_count
    else:
        text, _ = split_text(load_text(config.data), config.length)
        batches = TextBatches(text, config.length, config.seed, ragged=config.ragged)
        loss_fn = hf.loss_sum if isinstance(sizes, hf.HFConfig) else gpt.loss_sum
        count_fn = gpt.token_count

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        match config.optimizer:
            case "adamw":
                return AdamW(parameters, lr=config.lr)
            case "adam":
                return Adam(parameters, lr=config.lr)
            case "sgd":
                return SGD(parameters, lr=config.lr, momentum=0.9)

    def leading(batch: Any) -> tuple[int, ...]:
        return tuple(batch["tokens"].shape) if "tokens" in batch else (len(batch["x"]),)

    build = partial(build_model, config)
    dtype, width = config.torch_dtype, config.width
    return Job(build, loss_fn, count_fn, batches, optimizer, config.batch, dtype, config.seed, leading, width)
