"""Engines of torch and of other libraries, for ``plait verify --engine examples/engines.py:NAME``.

zero_redundancy   DDP with an optimizer whose state is cut over the ranks
dtensor           parallelize_module along the model's tensor plan
torch_pipelining  torch's 1F1B over stages of the model's blocks
accelerate        Hugging Face's Accelerator
trainer           transformers' Trainer, which has its own loop
deepspeed         DeepSpeed's engine on CPUs: its accumulation, its mean over the ranks, its clip
"""

import inspect
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Comm
from plait.pipeline.blocks import cut
from plait.referee.witness.engines import Driven, held, loop, shard
from plait.referee.witness.pieces import named
from plait.run.job.job import Job
from plait.schedule.partition import even
from plait.step.step import num_samples
from plait.tensor.plan import plan_of
from plait.torch_private import tree_map


def zero_redundancy(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """The same, with an optimizer whose state is cut over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    plain = job.optimizer(model.parameters())
    known = inspect.signature(type(plain)).parameters
    groups: Any = [{k: v for k, v in group.items() if k == "params" or k in known} for group in plain.param_groups]
    options = {name: value for name, value in plain.defaults.items() if name in known}
    wrapped, optimizer = DistributedDataParallel(model), ZeroRedundancyOptimizer(groups, type(plain), **options)
    return Driven(wrapped, optimizer, loop(job, wrapped, optimizer, comm.mesh.size, wrapped.no_sync))


def dtensor(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """torch's parallelize_module along the model's tensor plan: columns and rows; a data axis is fully_shard's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    plan = {name: styles[kind]() for name, kind in plan_of(model).items() if kind in styles}
    sizes = comm.mesh.data_size, comm.mesh.axis("tensor")
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    parallelize_module(model, device_mesh["tensor"], plan)
    if sizes[0] > 1:
        shard(model, device_mesh["data"])
    optimizer = job.optimizer(model.parameters())
    hold = (lambda: held(model)) if sizes[0] > 1 else nullcontext
    return Driven(model, optimizer, loop(job, model, optimizer, sizes[0], hold))


def torch_pipelining(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """torch's 1F1B over stages of the model's blocks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        raise ValueError("stages would each have a copy of a tied weight, and torch.distributed.pipelining sums none")
    links, rank, ranks = cut(model).blocks.names, comm.rank, comm.mesh.size
    split = even(len(links), ranks)
    stages = [nn.Sequential(*(model.get_submodule(links[i]) for i in own)) for own in split]
    stage, mine = stages[rank], [links[i] for i in split[rank]]
    names = {name: ".".join([mine[int(name.split(".")[0])], *name.split(".")[1:]]) for name, _ in named(stage)}
    optimizer = job.optimizer(stage.parameters())

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        if clip is not None:
            raise ValueError("torch's pipelining has no norm of all stages: give --clip None")
        optimizer.zero_grad()
        whole = _joined(batches)

        def loss(output: Tensor, rows: Tensor) -> Tensor:
            return job.loss_fn(lambda *_, **__: output, _rows(whole, rows)) / count  # type: ignore[arg-type]

        shapes = [_entering(job, batches[0])]
        with torch.no_grad():
            for other in stages[: rank + 1]:
                shapes.append(other(shapes[-1]))
        for output in shapes[1:]:
            output.requires_grad_()
        parts: Any = PipelineStage(
            stage, rank, ranks, torch.device("cpu"), input_args=shapes[-2], output_args=shapes[-1]
        )
        schedule = Schedule1F1B(parts, len(batches), loss_fn=loss, scale_grads=False)
        rows = torch.arange(num_samples(whole))
        first = (_entering(job, whole),) if rank == 0 else ()
        schedule.step(*first, target=rows if rank == ranks - 1 else None, return_outputs=False)
        optimizer.step()

    return Driven(stage, optimizer, step, {"names": names, "inputs": rank == 0})


def _joined(batches: Sequence[Any]) -> Any:
    """Microbatches of one structure as one batch."""
    def join(*leaves: Any) -> Any:
        cut = isinstance(leaves[0], Tensor) and leaves[0].dim() and [len(leaf) for leaf in leaves] == sizes
        return torch.cat(leaves) if cut else leaves[0]

    sizes = [num_samples(batch) for batch in batches]
    return tree_map(join, *batches)


def _rows(whole: Any, rows: Tensor) -> Any:
    num = num_samples(whole)
    return tree_map(lambda x: x[rows] if isinstance(x, Tensor) and x.dim() and len(x) == num else x, whole)


class _Entered(Exception):  # noqa: N818
    """Passes a loss's argument to its model."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _entering(job: Job, batch: Any) -> Tensor:
    def model(value: Tensor) -> Tensor:
        raise _Entered(value)

    try:
        job.loss_fn(model, batch)  # type: ignore[arg-type]
    except _Entered as entered:
        return entered.value
    raise ValueError("the loss gives its model nothing")


def accelerate(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Hugging Face's Accelerator around model and optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            with accelerator.no_sync(wrapped) if number < len(batches) - 1 else nullcontext():
                accelerator.backward(job.loss_fn(wrapped, batch) * comm.mesh.size / count)
        if clip is not None:
            accelerator.clip_grad_norm_(wrapped.parameters(), clip)
        optimizer.step()

    return Driven(wrapped, optimizer, step)


class Unconfigured(nn.Module):
    """A model that is not transformers', without its ``config``, in which Trainer writes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def trainer(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Hugging Face's Trainer around model and optimizer."""
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

    optimizer = job.optimizer(model.parameters())

    class JobTrainer(Trainer):
        loss_is_scaled_for_ga = True

        def get_train_dataloader(self) -> Any:
            return self.train_dataset

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
            batches = [next(epoch_iterator) for _ in range(num_batches)]
            count = torch.tensor([float(job.count_fn(one["batch"])) for one in batches], dtype=torch.float64).sum()
            return batches, self.accelerator.gather(count).sum()

        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Tensor:
            loss: Tensor = job.loss_fn(model, inputs["batch"]) * comm.mesh.size / num_items_in_batch
            return loss

    def train(steps: Sequence[Sequence[Any]], clip: float | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=len(steps),
                gradient_accumulation_steps=len(steps[0]),
                max_grad_norm=clip or 0.0,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=job.seed,
            )
            schedule: Any = job.scheduler(optimizer) if job.scheduler else LambdaLR(optimizer, lambda step: 1.0)
            data: Any = DataLoader([{"batch": batch} for step in steps for batch in step], batch_size=None)
            own = model if isinstance(model, PreTrainedModel) else Unconfigured(model)
            made = JobTrainer(own, args, train_dataset=data, optimizers=(optimizer, schedule))
            made.remove_callback(PrinterCallback)
            made.train()

    return Driven(model, optimizer, train=train)


def deepspeed(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """DeepSpeed's engine on CPUs, without ZeRO, whose flat partitions have no names; made when the microbatches are known."""
    import deepspeed as library
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())
    # gloo carries its messages: it would compile others first, through shared memory, for minutes
    library.ops.__compatible_ops__ = dict.fromkeys(library.ops.__compatible_ops__, False)
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
            made.append(library.initialize(**given)[0])
        (engine,) = made
        for batch in batches:
            engine.backward(job.loss_fn(engine, batch) * comm.mesh.size * len(batches) / count)
            engine.step()

    return Driven(model, optimizer, step)
