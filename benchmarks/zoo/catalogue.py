"""The list of models, how to build each, and its inputs."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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


class NotBuiltError(Exception):
    """The small model cannot be built or run on one process; plait has no part in it."""


Inputs = dict[str, Tensor]
Maker = Callable[[Any, int, int, torch.Generator], Inputs]


@dataclass(frozen=True)
class Kind:
    """A task: the source of its models, and makers of inputs; the first with which a model runs is its own."""

    names: Callable[[], list[str]]
    model: Callable[[str, bool], nn.Module]
    """The name, and whether to make it narrow (see ``shrink``)."""
    makers: tuple[Maker, ...]


def tokens(config: Any, samples: int, length: int, generator: torch.Generator) -> Inputs:
    ids = torch.randint(FIRST_TOKEN, SPECIAL, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - 2 :] = samples == 1  # the last sample of several is shorter
    return {"input_ids": ids, "attention_mask": mask}


def pair(config: Any, samples: int, length: int, generator: torch.Generator) -> Inputs:
    read = tokens(config, samples, length, generator)
    return read | {"decoder_input_ids": tokens(config, samples, length - 1, generator)["input_ids"]}


def image(config: Any, samples: int, length: int, generator: torch.Generator) -> Inputs:
    size = getattr(config, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": _noise(generator, samples + 1, getattr(config, "num_channels", 3), height, width)}


def square(config: Any, samples: int, length: int, generator: torch.Generator) -> Inputs:
    return {"x": _noise(generator, samples + 1, *config["input_size"])}


def sound(config: Any, samples: int, length: int, generator: torch.Generator) -> Inputs:
    return {"input_values": _noise(generator, samples, 400 * length)}


def frames(config: Any, samples: int, length: int, generator: torch.Generator) -> Inputs:
    number = getattr(config, "max_length", 8 * length)
    spectrum = _noise(generator, samples, number, _bins(config))
    return {"input_values": spectrum, "input_features": spectrum}


def bins(config: Any, samples: int, length: int, generator: torch.Generator) -> Inputs:
    number = 2 * getattr(config, "max_source_positions", 4 * length)
    return {"input_features": _noise(generator, samples, _bins(config), number)}


def _bins(config: Any) -> int:
    fields = ("num_mel_bins", "feature_projection_input_dim", "feature_size")
    return next((getattr(config, name) for name in fields if hasattr(config, name)), 80)


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _transformers(mapping: str, *makers: Maker) -> Kind:
    """The architectures of a mapping (config to class) of transformers."""

    def names() -> list[str]:
        from transformers.models.auto import modeling_auto

        return list(getattr(modeling_auto, f"{mapping}_NAMES"))

    def model(name: str, narrow: bool) -> nn.Module:
        import transformers
        from transformers.models.auto import modeling_auto

        config_class = transformers.CONFIG_MAPPING[name]
        config = config_class.from_dict(shrink(config_class().to_dict(), narrow=narrow) | {"num_labels": CLASSES})
        found = getattr(modeling_auto, mapping)[type(config)]
        made = found[0] if isinstance(found, tuple) else found
        if not isinstance(config, made.config_class):  # a decoder that is the text part of a larger model
            config = config.get_text_config()
        with torch.device("meta"):
            _check_size(made(config))
        return made._from_config(config, attn_implementation="eager", experts_implementation="eager")

    return Kind(names, model, makers)


def _timm(name: str, narrow: bool) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES)
    model.config = model.default_cfg
    _check_size(model)
    return model


def _timm_names() -> list[str]:
    """timm's own small models of most of its architectures; none where it is not installed."""
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
        return []
    import timm

    return list(timm.list_models("test_*"))


def declare_torchvision() -> None:
    """Before anything imports torchvision, which timm needs: the names of its compiled operators.

    They may be of another build of torch, and without their names it is not imported. No model here uses them.
    """
    if (spec := importlib.util.find_spec("torchvision")) is None or spec.origin is None:
        return
    text = (Path(spec.origin).parent / "_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(set(re.findall(r'(?:register_meta\("|torchvision::)(\w+)', text))):
        library.define(f"{name}(Tensor x) -> Tensor")
    LIBRARIES.append(library)


def _check_size(model: nn.Module) -> None:
    if (size := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise NotBuiltError(f"it has {size:,} parameters, of at most {LARGEST:,}")


LIBRARIES: list[torch.library.Library] = []
"""Declarations of operators, kept for as long as the process lives."""

KINDS = {
    "causal": _transformers("MODEL_FOR_CAUSAL_LM_MAPPING", tokens),
    "masked": _transformers("MODEL_FOR_MASKED_LM_MAPPING", tokens),
    "seq2seq": _transformers("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", pair),
    "image": _transformers("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", image, tokens),
    "audio": _transformers("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", sound, frames, bins),
    "timm": Kind(_timm_names, _timm, (square,)),
}


@dataclass(frozen=True)
class Entry:
    """A row of the zoo: a kind, and the name of the architecture."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


def entries(kinds: Sequence[str]) -> list[Entry]:
    """Every architecture of these kinds."""
    return [Entry(kind, name) for kind in kinds for name in KINDS[kind].names()]


def build(entry: Entry) -> tuple[nn.Module, Batches]:
    """The small model with random weights in fp64, and its batches; ``NotBuiltError`` where it does not run at all.

    One that does not run narrow is tried with few layers, but its own widths.
    """
    errors: list[Exception] = []
    for narrow in (True, False):
        torch.manual_seed(0)
        try:
            model = KINDS[entry.kind].model(entry.name, narrow).double().train()
        except Exception as error:
            errors.append(error)
            continue
        _distinct(model)
        for maker in KINDS[entry.kind].makers:
            try:
                return model, Batches(model, maker)
            except Exception as error:
                errors.append(error)
    first = errors[0]
    raise NotBuiltError(f"{type(first).__name__}: {first_line(first)}") from first


def _distinct(model: nn.Module) -> None:
    """Makes all layers different, and no value zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            fresh = 0.02 * torch.randn(parameter.shape, dtype=torch.float64)
            parameter.copy_(torch.where(parameter.isfinite(), parameter, 0) + fresh)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


class Batches:
    """The microbatches of every step, the same for all layouts; raises where the model cannot take them."""

    def __init__(self, model: nn.Module, make: Maker) -> None:
        self.config, self.make = model.config, make
        self.accepts = inspect.signature(model.forward).parameters
        self.shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        """The shape of the logits, by samples and length."""
        for size in dict.fromkeys(SIZES):
            with torch.no_grad():
                inputs = self.inputs(size, torch.Generator().manual_seed(0))
                self.shapes[size] = tuple(logits_of(model, inputs).shape)

    def inputs(self, size: tuple[int, int], generator: torch.Generator) -> Inputs:
        made = self.make(self.config, *size, generator)
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


def logits_of(model: nn.Module, inputs: Inputs) -> Tensor:
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
    """The samples and time of a microbatch's products."""
    first = next(iter(batch["inputs"].values()))
    return tuple(first.shape[:2]) if not first.is_floating_point() else (math.prod(first.shape[:1]),)
