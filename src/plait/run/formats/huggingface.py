"""Hugging Face folders: each rank reads only the rows that it keeps; rank 0 writes, tensor by tensor.

    model.safetensors.index.json        the file of each tensor, if there are several files
    model-00001-of-00002.safetensors    a file (see ``checkpoint.tensor_file``)

Writing needs no tensor before its turn: the header follows from names and shapes, and each tensor goes to its place
when it arrives.
"""

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.files.reading import check_readable, read_file, read_text
from plait.checkpoint.files.writing import told
from plait.checkpoint.folder import folder_at
from plait.checkpoint.manifest import REAL, parsed
from plait.checkpoint.snapshot import is_finite
from plait.checkpoint.stored import Checkpoint, Stored, StoredWeights
from plait.checkpoint.tensor_file import TensorFile, bytes_of, safetensors_header
from plait.messages.progress import counted
from plait.step import Engine
from plait.table.region import Region
from plait.zero.state.full import whole_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Largest file in bytes, unless one tensor is larger; a larger model gets several files."""

COPIED = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("spiece.model", "*.tiktoken", "additional_chat_templates/*", "generation_config.json", "LICENSE*"),
)
"""Files that an export copies from the source."""

FILE = re.compile(r"[^/\0]+\.safetensors(\.index\.json)?")
LARGEST_INDEX = 1 << 26
"""Largest index, in bytes."""
LARGEST_COPIED = 1 << 29
"""Largest file of a tokenizer, in bytes."""

IGNORED = (r"rotary_emb\.inv_freq$",)
"""Tensors of older files that models no longer read; transformers ignores them too."""


@dataclass(frozen=True)
class InFolder(Stored):
    """A tensor in one of a folder's files, and its name there."""

    path: Path
    key: str


@dataclass(frozen=True)
class FolderWeights(StoredWeights):
    """A folder's weights by the names of a model that they fit."""

    tensors: Mapping[str, InFolder]

    def fill(self, name: str, region: Region, into: Tensor) -> None:
        """Reads a block; ValueError for values that are not finite, or not in the dtype of ``into``."""
        super().fill(name, region, into)
        if into.is_floating_point() and not is_finite(into):
            raise ValueError(
                f"{self.tensors[name].key!r} in {str(self.tensors[name].path)!r} has values that are not finite in its "
                f"region {region}, read as {into.dtype}: the file is damaged, or its training had failed; take another"
            )

    def fill_buffers(self, model: nn.Module) -> None:
        """Gives the model's buffers the values that the folder has for them."""
        for name, buffer in model.named_buffers():
            if name in self.tensors:
                buffer.copy_(self.tensors[name].read())


def open_folder(path: str | Path, model: nn.Module) -> FolderWeights:
    """The weights in a folder for a model, which may be on meta.

    A tied weight may have any of its names there, or several with equal values.  A base model without a head has names
    without the prefix.  ValueError for missing or damaged files; for tensors that are missing, surplus, or of another
    shape.
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
            f"the weights in {str(path)!r} are not those of its config.json: {len(missing)} missing {missing[:4]}, "
            f"{len(surplus)} surplus {[name[:80] for name in surplus[:4]]}; take both from one model"
        )
    for name, copies in places.items():
        for at in copies:
            shape, dtype = tuple(state[name].shape), state[name].dtype
            if at.shape != shape or (dtype.is_floating_point and not at.dtype.is_floating_point):
                raise ValueError(
                    f"{at.key!r} has the shape {at.shape} and {at.dtype} in {str(at.path)!r}, but {shape} and {dtype} "
                    f"by config.json: take the config and the weights from one model"
                )
        if differing := [at.key for at in copies[1:] if not at.equals(copies[0])]:
            raise ValueError(
                f"config.json ties {copies[0].key!r} and {differing[0]!r}, so they are one weight, but the files in "
                f"{str(path)!r} have different values for them: set tie_word_embeddings to false, or drop one"
            )
    return FolderWeights({name: copies[0] for name, copies in places.items() if copies})


def _stored(folder: Path) -> dict[str, InFolder]:
    """The tensors in a folder's files, by name."""
    if os.path.lexists(folder / SINGLE):
        return _tensors([_file(folder, SINGLE)])
    if not os.path.lexists(folder / INDEX):
        raise ValueError(
            f"neither {SINGLE} nor {INDEX} in {str(folder)!r}: convert other formats first, as "
            f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers does"
        )
    index = _file(folder, INDEX)
    text = read_text(index, "the index", LARGEST_INDEX)
    try:
        match parsed(text):
            case {"weight_map": dict(places)} if all(isinstance(name, str) for name in places.values()):
                names = sorted(set(places.values()))
            case _:
                raise ValueError("it has no weight_map from tensors to files")
        files = {name: _file(folder, name) for name in names}
    except ValueError as error:
        raise ValueError(f"cannot read {str(index)!r}: {error}") from error
    stored = _tensors(list(files.values()))
    for key, name in places.items():
        if key not in stored or stored[key].path != files[name]:
            raise ValueError(
                f"{str(index)!r} says that {key[:80]!r} is in {name[:80]!r}, and it is not: copy both again"
            )
    return stored


def _tensors(files: Sequence[Path]) -> dict[str, InFolder]:
    stored: dict[str, InFolder] = {}
    for place in files:
        file = TensorFile(place)
        try:
            entries = file.entries
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the weights in {str(place)!r}: {error}; copy the file again") from error
        for key, entry in entries.items():
            if key in stored:
                raise ValueError(f"{key[:80]!r} is in {str(stored[key].path)!r} and in {str(place)!r}: drop one")
            stored[key] = InFolder(entry.dtype, entry.shape, partial(file.fill, key), place, key)
    return stored


def _file(folder: Path, name: str) -> Path:
    if not FILE.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of a file in the folder")
    return _inside(folder, name)


def _inside(folder: Path, name: str) -> Path:
    """A file with links resolved; ValueError for a link out of the folder.  In the cache of Hugging Face,
    ``snapshots/9f3c/model.safetensors`` is a link into ``blobs``."""
    home, real = folder.resolve(), Path(os.path.realpath(folder / name))
    blobs = home.parent.with_name("blobs") if home.parent.name == "snapshots" else home
    if real.parent not in ((home / name).parent, blobs):
        raise ValueError(f"{str(folder / name)!r} is a link out of its folder, to {str(real)!r}: copy the file instead")
    return real


def write_folder(path: str | Path, engine: Engine, source: str | Path | None = None) -> None:
    """Writes the engine's model as a folder that ``transformers`` loads with ``from_pretrained``.

    All ranks call it together, and rank 0 writes.  A rank has one gathered unit and one whole tensor in memory at a
    time.  The folder is ``path.partial`` until it is complete.  Tokenizer and generation config come from ``source``.
    ValueError if the folder exists, or the model has no config of transformers.
    """
    folder, config = folder_at(path), getattr(engine.model, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise ValueError(
            f"{type(engine.model).__name__} has no config of transformers: only models of transformers are exported"
        )
    directory = engine.placed.directory
    tensors = whole_tensors(directory, engine.placed.parts(), engine.comm)
    if engine.comm.rank == 0:
        shapes = {name: directory.shapes[name] for name in dict.fromkeys(directory.aliases.values())}
        write_model(folder, engine.model, shapes, tensors, source)
    for _ in tensors:  # the other ranks take part, and keep none
        pass


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each tensor."""


def write_model(
    folder: Path, model: nn.Module, shapes: Shapes, tensors: Iterable[tuple[str, Tensor]], source: str | Path | None
) -> None:
    """Writes a folder of a model of transformers from tensors that arrive one by one."""
    if os.path.lexists(folder):
        raise ValueError(f"{str(folder)!r} exists already: export to a new folder")
    if odd := [name for name, (_, dtype) in shapes.items() if dtype in REAL]:
        raise ValueError(f"{odd[0]!r} is of {shapes[odd[0]][1]}, which safetensors cannot hold: export another dtype")
    partial, copies = folder.with_name(f"{folder.name}.partial"), copied_files(source)
    with told(folder, sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        write_tensors(partial, shapes, tensors)
        _write_config(partial, model, next(dtype for _, dtype in shapes.values() if dtype.is_floating_point))
        for name, file in copies.items():
            copied = partial / name
            copied.parent.mkdir(exist_ok=True)
            copied.write_bytes(read_file(file, "the file to copy", LARGEST_COPIED))
        partial.rename(folder)


def copied_files(source: str | Path | None) -> dict[str, Path]:
    """The files that an export copies from a model's folder, by name; checked before a run and again at its end.
    ValueError for a link out of the folder, something other than a plain file, or a file that is too large."""
    if source is None:
        return {}
    home, found = Path(source), dict[str, Path]()
    for name in sorted({str(file.relative_to(home)) for pattern in COPIED for file in home.glob(pattern)}):
        if not (home / name).is_dir():  # a folder LICENSES is not one of the files LICENSE*
            found[name] = _inside(home, name)
            check_readable(found[name], "the file to copy", LARGEST_COPIED)
    return found


def write_tensors(
    folder: Path, shapes: Shapes, tensors: Iterable[tuple[str, Tensor]], limit: int = SHARD_BYTES
) -> None:
    """Writes tensors, which arrive one by one, as safetensors files of at most ``limit`` bytes, and an index of
    several."""
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
        header, starts, end = safetensors_header({name: shapes[name] for name in names})
        with file.open("wb") as new:
            new.write(header)
            new.truncate(end)
        places |= {name: (file, start) for name, start in starts.items()}
    for name, tensor in tensors:
        file, start = places[name]
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(bytes_of(tensor))
    if count > 1:
        weight_map = {name: file.name for name, (file, _) in places.items()}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(folder: Path, model: Any, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def export(
    saved: Checkpoint,
    folder: str | Path,
    model: nn.Module,
    source: str | Path,
    *,
    ema: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a checkpoint's weights as a folder of transformers; a whole tensor is in memory at a time.  ValueError if
    the checkpoint is damaged, of another model, or has no average, or the folder exists.

    Args:
        model: a model of transformers, for its config and its names; it may be on meta.
        source: the folder of the tokenizer and the generation config.
        ema: export the average, and buffers and frozen parameters as they are.
        dtype: the dtype of floating-point tensors; as they were saved unless given.
    """
    saved.check()
    found = saved.kind("model")
    if ema:
        if not (averaged := saved.kind("ema")):
            raise ValueError(f"{str(saved.folder)!r} has no average of the weights: leave --ema out")
        found |= averaged
    state = model.state_dict(keep_vars=True)
    own = {name: value for name, value in (*model.named_parameters(), *model.named_buffers()) if name in state}
    others = {name for name, _ in model.named_buffers()} - own.keys()  # transformers does not write them
    missing, surplus = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys() - others)
    wrong = [name for name in own if name in found and found[name].shape != tuple(own[name].shape)]
    if missing or surplus or wrong:
        raise ValueError(
            f"the checkpoint is not of the model in {str(source)!r}: missing {missing[:3]}, surplus {surplus[:3]}, of "
            f"another shape {wrong[:3]}"
        )
    kinds = {name: dtype if dtype and found[name].dtype.is_floating_point else found[name].dtype for name in own}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in counted("tensors", list(own)):
            yield name, found[name].read().to(kinds[name])

    write_model(folder_at(folder), model, {name: (found[name].shape, kinds[name]) for name in own}, tensors(), source)
