"""DeepSpeed's pipeline engine on CPUs, for ``plait verify --engine tests/witness/deepspeed_pipe.py:pipeline``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.pipe import PipelineModule
from torch import nn

from plait.comm import Comm
from plait.pipeline.blocks import blocks_of
from plait.referee.witness.engines import Driven
from plait.run.job.job import Job


def pipeline(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Two microbatches a step, whose losses it averages; a batch is a dict whose ``x`` enters the model."""
    set_accelerator(CPU_Accelerator())
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    names, scale = blocks_of(model).names, [1.0]
    stage = PipelineModule(
        layers=[model.get_submodule(name) for name in names],
        num_stages=comm.mesh.size,
        loss_fn=lambda output, batch: job.loss_fn(lambda *_: output, batch) * scale[0],  # type: ignore[arg-type]
        partition_method="uniform",
    )
    told = {name: f"{names[int(name.split('.')[0])]}.{name.split('.', 1)[1]}" for name, _ in stage.named_parameters()}
    optimizer = job.optimizer(stage.parameters())
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        scale[0] = len(batches) / count  # of which it takes the mean
        engine.train_batch(iter([(batch["x"], batch) for batch in batches]))

    return Driven(stage, optimizer, step, {"names": told, "inputs": comm.rank == 0})
