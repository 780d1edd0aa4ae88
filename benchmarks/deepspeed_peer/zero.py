"""DeepSpeed's ZeRO stages as contestants: ``deepspeed.initialize`` around the model and optimizer that all train.

    deepspeed-zero1    optimizer states cut
    deepspeed-zero2    and gradients
    deepspeed-zero3    and parameters

fp32, no offloading, no clipping, everything else as DeepSpeed sets it; on the process group that is there (gloo).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.contestants import Build, Contestant, adamw
from harness.models import Batch, Workload
from torch import Tensor


def _zero(workload: Workload, ranks: int, stage: int) -> Contestant:
    import deepspeed

    model = workload.build()
    samples = len(workload.batch(0, 0, ranks)[0])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # not its default: none of the others clips
        "zero_optimization": {"stage": stage},
    }
    optimizer = adamw(model.parameters(), workload.learning_rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batch: Batch) -> Tensor:
        loss = workload.loss_mean(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Contestant(step, loss_is_global=False)


STAGES: dict[str, Build] = {f"deepspeed-zero{stage}": partial(_zero, stage=stage) for stage in (1, 2, 3)}
