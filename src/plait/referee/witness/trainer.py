"""transformers' Trainer as an engine: its loop, its DDP, its clip; the job's data, loss and count in their places.

get_train_dataloader   the rank's microbatches, of all steps
get_batch_samples      their count, gathered over the ranks as Trainer does with labels
compute_loss           the sum of the losses over that count, times the ranks, of which DDP takes the mean
"""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from plait.comm import Comm
from plait.referee.witness.engines import Driven
from plait.run.job.job import Job


class Unconfigured(nn.Module):
    """A model that is not transformers', without its ``config``, in which Trainer writes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def trainer(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Hugging Face's Trainer around model and optimizer."""
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
            data: Any = DataLoader([{"batch": batch} for step in steps for batch in step], batch_size=None)  # type: ignore[arg-type]
            own = model if isinstance(model, PreTrainedModel) else Unconfigured(model)
            made = JobTrainer(own, args, train_dataset=data, optimizers=(optimizer, schedule))
            made.remove_callback(PrinterCallback)
            made.train()

    return Driven(model, optimizer, train=train)
