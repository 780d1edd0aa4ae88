"""A script around transformers' Trainer, under a witness: sequences whose numbers of targets differ, accumulated."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine_ranks import become
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import plait

TOKENS, TIME, RANKS, PARTS, EACH, STEPS = 11, 6, 2, 2, 2, 2
SAMPLES = RANKS * PARTS * EACH
RATE, CLIP = 1e-2, 0.5


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=TIME,
        )
    )  # fmt: skip


def text(step: int) -> dict[str, Tensor]:
    """Sequences with 1 to 6 tokens as labels; the first is no target."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(TOKENS, (SAMPLES, TIME), generator=random)
    lengths = torch.tensor([6, 5, 2, 3, 4, 3, 6, 2])
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(TIME) >= lengths[:, None], -100)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, num_items_in_batch=1).loss
    return loss


def num_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] >= 0).sum())


def loss_outside(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


job = plait.UserJob(llama, loss_sum, text, num_targets, adamw)
outside = plait.UserJob(llama, loss_outside, text, num_targets, adamw)
"""The same, with labels that do not enter the model: Trainer takes them out for a ``compute_loss_func``."""


def over_the_count(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def mean_of_a_forward(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A user's loss that does not read the count: Trainer assumes that it does."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnLoss(Trainer):
    """A user's compute_loss, as in examples: the mean of a forward, which Trainer averages."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **rest: Any) -> Tensor:
        loss: Tensor = model(**inputs).loss
        return loss

    loss_is_scaled_for_ga = False


KINDS: dict[str, tuple[type[Trainer], dict[str, Any], dict[str, Any]]] = {
    "as it comes": (Trainer, {}, {}),
    "a rank's own count": (Trainer, {"average_tokens_across_devices": False}, {}),
    "an own loss": (Trainer, {}, {"compute_loss_func": over_the_count}),
    "an own loss that ignores the count": (Trainer, {"max_grad_norm": 0.0}, {"compute_loss_func": mean_of_a_forward}),
    "an own compute_loss": (OwnLoss, {}, {}),
}
"""The class, its arguments, and what it is given."""


def script(kind: str, folder: Path) -> None:
    """A user runs it under torchrun."""
    made, settings, given = KINDS[kind]
    torch.manual_seed(0)
    model = llama()
    optimizer = adamw(model.parameters())
    batches = [text(step) for step in range(STEPS)]
    samples = [{name: batch[name][i] for name in batch} for batch in batches for i in range(SAMPLES)]
    args = TrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=EACH,
        gradient_accumulation_steps=PARTS, save_strategy="no", logging_strategy="no", report_to=[],
        disable_tqdm=True, train_sampling_strategy="sequential", **{"max_grad_norm": CLIP, **settings},
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = made(model, args, train_dataset=samples, optimizers=(optimizer, schedule), **given)
    trainer.remove_callback(PrinterCallback)
    with plait.witness(model, optimizer, folder / "witnessed"):
        trainer.train()


def rank_main(rank: int, ranks: int, port: int, path: str) -> None:
    become(rank, ranks, port)
    warnings.simplefilter("ignore")
    for kind in KINDS:
        script(kind, Path(path) / kind)
