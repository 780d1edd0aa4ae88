"""Which models there are, how one is built, and what goes in.

A kind of model is a mapping of transformers' (config to class) and a function that makes a microbatch for it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shrink import SPECIAL, VOCABULARY, shrink
from torch import Tensor, nn

CLASSES = 5
FIRST_TOKEN = VOCABULARY // 2
SIZES = ((2, 12), (1, 12), (3, 8), (2, 12), (1, 8), (2, 12))
"""Samples and length of each microbatch of a step."""
TARGETS_LEFT_OUT = 0.2
LARGEST = 20_000_000
"""Parameters beyond which a model has not been made small."""


class NotBuilt(Exception):
    """transformers cannot build or run the small model on one process; plait has no part in it."""


@dataclass(frozen=True)
class Kind:
    """A task of transformers."""

    mapping: str
    inputs: Callable[[Any, int, int, torch.Generator], dict[str, Tensor]]


def tokens(config: Any, samples: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(FIRST_TOKEN, SPECIAL, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - 2 :] = samples == 1  # the last sample of several is shorter
    return {"input_ids": ids, "attention_mask": mask}


def pair(config: Any, samples: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    read = tokens(config, samples, length, generator)
    return read | {"decoder_input_ids": tokens(config, samples, length - 1, generator)["input_ids"]}


def image(config: Any, samples: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    size = getattr(config, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else size
    shape = samples, getattr(config, "num_channels", 3), height, width
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


def audio(config: Any, samples: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(samples, 400 * length, generator=generator, dtype=torch.float64)}


KINDS = {
    "causal": Kind("MODEL_FOR_CAUSAL_LM_MAPPING", tokens),
    "masked": Kind("MODEL_FOR_MASKED_LM_MAPPING", tokens),
    "seq2seq": Kind("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", pair),
    "image": Kind("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", image),
    "audio": Kind("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", audio),
}


@dataclass(frozen=True)
class Entry:
    """A row of the zoo: a kind, and transformers' name of the architecture."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


def entries(kinds: Sequence[str]) -> list[Entry]:
    """Every architecture of these kinds."""
    from transformers.models.auto import modeling_auto

    return [
        Entry(kind, name) for kind in kinds for name in getattr(modeling_auto, f"{KINDS[kind].mapping}_NAMES")
    ]


def build(entry: Entry) -> nn.Module:
    """The small model with random weights in fp64; ``NotBuilt`` where transformers refuses."""
    import transformers
    from transformers.models.auto import modeling_auto

    torch.manual_seed(0)
    try:
        config_class = transformers.CONFIG_MAPPING[entry.name]
        config = config_class.from_dict(shrink(config_class().to_dict()) | {"num_labels": CLASSES})
        made = getattr(modeling_auto, KINDS[entry.kind].mapping)[type(config)]
        made = made[0] if isinstance(made, tuple) else made
        with torch.device("meta"):
            if (size := sum(p.numel() for p in made(config).parameters())) > LARGEST:
                raise NotBuilt(f"it has {size:,} parameters, of at most {LARGEST:,}")
        model: nn.Module = made._from_config(config, attn_implementation="eager", experts_implementation="eager").double()
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {first_line(error)}") from error
    with torch.no_grad():
        for parameter in model.parameters():  # no two alike, and no zeros
            fresh = 0.02 * torch.randn(parameter.shape, dtype=torch.float64)
            parameter.copy_(torch.where(parameter.isfinite(), parameter, 0) + fresh)
    return model.train()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


class Batches:
    """The microbatches of every step, the same for all layouts."""

    def __init__(self, entry: Entry, model: nn.Module) -> None:
        self.config, self.make = model.config, KINDS[entry.kind].inputs
        self.accepts = inspect.signature(model.forward).parameters
        self.main = getattr(model, "main_input_name", "")
        self.shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        """Of the logits, by samples and length."""

    def learn(self, model: nn.Module) -> None:
        """Run the model once on each size, to know the shapes of its logits."""
        for size in dict.fromkeys(SIZES):
            with torch.no_grad():
                self.shapes[size] = tuple(logits_of(model, self.inputs(size, torch.Generator().manual_seed(0))).shape)

    def inputs(self, size: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
        made = self.make(self.config, *size, generator)
        if "input_values" in made and self.main != "input_values":
            bins = next((getattr(self.config, n) for n in ("num_mel_bins", "feature_size") if hasattr(self.config, n)), 80)
            frames = getattr(self.config, "max_length", None) or 2 * getattr(self.config, "max_source_positions", 32)
            shape = (size[0], frames, bins) if self.main == "input_values" else (size[0], bins, frames)
            made = {self.main: torch.randn(shape, generator=generator, dtype=torch.float64)}
        return {name: value for name, value in made.items() if name in self.accepts}

    def microbatch(self, step: int, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 * step + index)
        size = SIZES[index]
        *places, classes = self.shapes[size]
        targets = torch.randint(classes, places, generator=generator)
        if len(places) > 1:
            left_out = torch.rand(places, generator=generator) < TARGETS_LEFT_OUT
            targets = targets.masked_fill(left_out, -100)
        return {"inputs": self.inputs(size, generator), "targets": targets}


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = next(iter(output.values()))
    return logits


def count(batch: dict[str, Any]) -> int:
    return int((batch["targets"] != -100).sum())


def leading(batch: dict[str, Any]) -> tuple[int, ...]:
    """Samples and time of what a microbatch's products read."""
    first = next(iter(batch["inputs"].values()))
    return tuple(first.shape[:2]) if not first.is_floating_point() else (math.prod(first.shape[:1]),)
