"""Hugging Face folders: read by every rank, only the rows that it keeps; written by rank 0, tensor by tensor.

    model.safetensors.index.json        which file has which tensor, where there are several
    model-00001-of-00002.safetensors    8 bytes: the header's length | header: name, dtype, shape, bytes a..b | bytes

Reading maps the file and copies blocks out of it.  Writing needs no tensor before its turn: the header follows from
names and shapes, and each tensor goes to its place as it comes.
"""

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from plait.core.layout import Region
from plait.engine import Engine
from plait.engine.state.full import whole_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""A larger model is written in several files of at most this size (a larger tensor gets its own)."""

COPIED = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("spiece.model", "*.tiktoken", "additional_chat_templates", "generation_config.json", "LICENSE*"),
)
"""Files of the source that an exported folder gets unchanged."""

IGNORED = (r"rotary_emb\.inv_freq$",)
"""Tensors of older files that models no longer read (transformers ignores them too)."""

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls dtypes."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: the file, and its name there."""

    file: Path
    key: str
    shape: tuple[int, ...]

    def read(self, region: Region | None = None) -> Tensor:
        """The tensor or a block of it: a view of the mapped file, or a copy where a block is not contiguous there.

        The file is mapped for this call and as long as the result lives, so what was read before takes no memory.
        """
        with safe_open(self.file, "pt") as file:
            if region is None:
                whole: Tensor = file.get_tensor(self.key)
                return whole
            block: Tensor = file.get_slice(self.key)[tuple(slice(start, stop) for start, stop in region)]
        return block


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a folder, by the names of a model that they fit; an ``engine.state.weights.Weights``."""

    places: Mapping[str, Stored]

    def read(self, name: str, region: Region) -> Tensor:
        """See ``Stored.read``."""
        return self.places[name].read(region)

    def fill_buffers(self, model: nn.Module) -> None:
        """Give the model's buffers the values that the folder has for them."""
        for name, buffer in model.named_buffers():
            if name in self.places:
                buffer.copy_(self.places[name].read())


def open_folder(path: str | Path, model: nn.Module) -> FolderWeights:
    """The weights in a folder, for a model of these names and shapes (its parameters may be on meta).

    Of a tied weight the folder may have any of its names, or several if their values are equal.  If it has only the
    base model, without a head, its names lack a prefix.

    Raises:
        ValueError: files that are missing or damaged, tensors that are missing, surplus, or of another shape.
    """
    stored = _stored(Path(path))
    state = model.state_dict(keep_vars=True)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if not any(key.startswith(prefix) for key in stored):
        stored = {key if key in state else prefix + key: at for key, at in stored.items()}
    names = {id(p): n for n, p in model.named_parameters()}
    keys: dict[str, list[str]] = {}
    for key, value in state.items():
        keys.setdefault(names.get(id(value), key), []).append(key)
    places = {name: [stored[key] for key in own if key in stored] for name, own in keys.items()}
    missing = [name for name in names.values() if not places[name]]
    ignored = (*IGNORED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    surplus = [at.key for key, at in stored.items() if key not in state and not any(re.search(p, key) for p in ignored)]
    if missing or surplus:
        raise ValueError(
            f"the weights in {str(path)!r} are not those of its config.json: missing {_some(missing)}; "
            f"surplus {_some(surplus)}; take both from one model"
        )
    for name, copies in places.items():
        for at in copies:
            if at.shape != (shape := tuple(state[name].shape)):
                raise ValueError(
                    f"{at.key!r} has the shape {at.shape} in {str(at.file)!r}, but {shape} by config.json: take the "
                    f"config and the weights from one model"
                )
        if differing := [at.key for at in copies[1:] if not torch.equal(at.read(), copies[0].read())]:
            raise ValueError(
                f"config.json ties {copies[0].key!r} and {differing[0]!r}, so they are one weight, but the files in "
                f"{str(path)!r} have different values for them: set tie_word_embeddings to false, or drop one"
            )
    return FolderWeights({name: copies[0] for name, copies in places.items() if copies})


def _some(names: Sequence[str]) -> str:
    """``3 tensors (a, b, ...)``, or ``nothing``."""
    if not names:
        return "nothing"
    more = ", ..." if len(names) > 4 else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({', '.join(names[:4])}{more})"


def _stored(folder: Path) -> dict[str, Stored]:
    """The tensors in a folder's files, by name."""
    files, index = [folder / SINGLE], folder / INDEX
    if not files[0].is_file():
        if not index.is_file():
            raise ValueError(
                f"neither {SINGLE} nor {INDEX} in {str(folder)!r}: convert other formats first, as "
                f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers does"
            )
        try:
            files = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"cannot read {str(index)!r}: {type(error).__name__}: {error}") from error
    stored: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
            stored |= {key: Stored(file, key, tuple(shape)) for key, shape in shapes.items()}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read the weights in {str(file)!r}: {error}; copy the file again") from error
    return stored


def write_folder(path: str | Path, engine: Engine, source: str | Path | None = None) -> None:
    """Write the engine's model as a folder that ``transformers`` loads with ``from_pretrained``.

    All ranks call it together and rank 0 writes; a rank has one gathered unit and one whole tensor in memory at a time.
    The folder is written as ``path.partial`` and renamed when it is complete.  Tokenizer and generation config are
    copied from ``source``.

    Raises:
        ValueError: the folder exists, or the model has no config of transformers.
    """
    folder, config = Path(path), getattr(engine.model, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise ValueError(
            f"{type(engine.model).__name__} has no config of transformers: only models of transformers are exported"
        )
    tensors = whole_tensors(engine.directory, engine.parts(), engine.comm)
    if engine.comm.rank > 0:
        for _ in tensors:
            pass
        return
    shapes = {name: engine.directory.shapes[name] for name in dict.fromkeys(engine.directory.aliases.values())}
    write_model(folder, engine.model, shapes, tensors, source)


def write_model(
    folder: Path,
    model: nn.Module,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, Tensor]],
    source: str | Path | None,
) -> None:
    """Write a folder of a model of transformers; its values are ``tensors``, which arrive one by one."""
    if os.path.lexists(folder):
        raise ValueError(f"{str(folder)!r} exists already: export to a new folder")
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    write_tensors(partial, shapes, tensors)
    _write_config(partial, model, next(dtype for _, dtype in shapes.values() if dtype.is_floating_point))
    for file in sorted({f for pattern in COPIED for f in Path(source).glob(pattern)} if source is not None else ()):
        (shutil.copytree if file.is_dir() else shutil.copyfile)(file, partial / file.name)
    partial.rename(folder)


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, Tensor]],
    limit: int = SHARD_BYTES,
) -> None:
    """Write safetensors files, and their index where there are several, from tensors that arrive one by one.

    ``shapes`` are the shapes and dtypes of all of them, by name; ``limit`` is in bytes.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[other] for other in files[-1]) + size > limit:
            files.append([])
        files[-1].append(name)
    count = len(files)
    places: dict[str, tuple[Path, int]] = {}
    for number, names in enumerate(files, 1):
        file = folder / (SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors")
        header, starts, end = safetensors_header({name: shapes[name] for name in names}, sizes)
        with file.open("wb") as new:
            new.write(header)
            new.truncate(end)
        places |= {name: (file, start) for name, start in starts.items()}
    for name, tensor in tensors:
        file, start = places[name]
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if count > 1:
        weight_map = {name: file.name for name, (file, _) in places.items()}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def safetensors_header(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], sizes: Mapping[str, int]
) -> tuple[bytes, dict[str, int], int]:
    """A file's beginning, where in the file each tensor starts, and where the last one ends.

    Wide dtypes come first, which keeps every tensor aligned; the header is padded to 8 bytes for the same reason.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: -item[1][1].itemsize):
        entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    starts = {name: begin + entries[name]["data_offsets"][0] for name in shapes}
    return len(text).to_bytes(8, "little") + text, starts, begin + end


def _write_config(folder: Path, model: Any, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
