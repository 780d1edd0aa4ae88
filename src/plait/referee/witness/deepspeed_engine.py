"""DeepSpeed's engine on CPUs, without ZeRO: its accumulation, its mean over the ranks, its clip.

ZeRO gives the optimizer flat partitions of its own, which have no names that a witness could tell.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from plait.comm import Comm
from plait.referee.witness.engines import Driven
from plait.run.job.job import Job


def deepspeed_engine(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """``deepspeed.initialize`` around model and optimizer, at the first step, when the microbatches are known."""
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.accelerator import set_accelerator  # type: ignore[import-not-found]
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # type: ignore[import-not-found]

    set_accelerator(CPU_Accelerator())
    # gloo carries its messages: it would compile others first, through shared memory, for minutes
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    optimizer = job.optimizer(model.parameters())
    made: list[Any] = []

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        if not made:
            config = {
                "train_micro_batch_size_per_gpu": 1,  # says nothing of the samples: the job's loss is a sum
                "gradient_accumulation_steps": len(batches),
                "gradient_clipping": clip or 0.0,
            }
            given = {"model": model, "optimizer": optimizer, "config": config, "dist_init_required": False}
            made.append(deepspeed.initialize(**given)[0])
        (engine,) = made
        for batch in batches:
            engine.backward(job.loss_fn(engine, batch) * comm.mesh.size * len(batches) / count)
            engine.step()

    return Driven(model, optimizer, step)
