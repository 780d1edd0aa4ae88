"""Hugging Face folders: read by every rank, only the rows that it keeps; written by rank 0, tensor by tensor.

    model.safetensors.index.json        which file has which tensor, where there are several
    model-00001-of-00002.safetensors    8 bytes: the header's length | header: name, dtype, shape, bytes a..b | bytes

Reading takes blocks out of the file (see ``tensor_file``).  Writing needs no tensor before its turn: the header follows
from names and shapes, and each tensor goes to its place as it comes.
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
from torch import Tensor, nn

from plait.checkpoint.files.reading import check_readable, read_file
from plait.checkpoint.files.writing import told
from plait.checkpoint.folder import Folder, contents
from plait.checkpoint.snapshot import is_finite
from plait.checkpoint.tensor_file import REAL, Check, TensorEntry, TensorFile, parsed, safetensors_header
from plait.step import Engine
from plait.table.layout import Region, extent
from plait.zero.state.full import whole_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""A larger model is written in several files of at most this size (a larger tensor gets its own)."""

COPIED = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("spiece.model", "*.tiktoken", "additional_chat_templates/*", "generation_config.json", "LICENSE*"),
)
"""Files of the source that an exported folder gets unchanged."""

FILE = re.compile(r"[^/\0]+\.safetensors(\.index\.json)?")
LARGEST_INDEX = 1 << 26
"""Bytes of an index."""
LARGEST_COPIED = 1 << 29
"""Bytes of a tokenizer's file."""

IGNORED = (r"rotary_emb\.inv_freq$",)
"""Tensors of older files that models no longer read (transformers ignores them too)."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: the file, and its name there."""

    file: TensorFile
    key: str

    @property
    def entry(self) -> TensorEntry:
        return self.file.entries[self.key]

    def read(self, region: Region | None = None) -> Tensor:
        """The tensor or a block of it, in memory of its own."""
        region = tuple((0, size) for size in self.entry.shape) if region is None else region
        block = torch.empty(extent(region), dtype=self.entry.dtype)
        self.fill(region, block)
        return block

    def fill(self, region: Region, into: Tensor, check: Check | None = None) -> None:
        """A block, into memory that is there (see ``OpenTensors.read``)."""
        with self.file.opened() as file:
            file.read(self.key, region, into, check)


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a folder, by the names of a model that they fit; an ``engine.state.weights.Weights``."""

    places: Mapping[str, Stored]

    def fill(self, name: str, region: Region, into: Tensor) -> None:
        """See ``Stored.fill``; ValueError for values that are not finite."""
        at = self.places[name]

        def check(part: Region, value: Tensor) -> None:
            if value.is_floating_point() and not is_finite(value if value.itemsize > 1 else value.float()):
                raise ValueError(
                    f"{at.key!r} in {str(at.file.place)!r} has values that are not finite in its region {part}: the "
                    f"file is damaged, or its training had failed; take another"
                )

        at.fill(region, into, check)

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
            entry, shape = at.entry, tuple(state[name].shape)
            if entry.shape != shape or (state[name].is_floating_point() and not entry.dtype.is_floating_point):
                raise ValueError(
                    f"{at.key!r} has the shape {entry.shape} and {entry.dtype} in {str(at.file.place)!r}, but {shape} "
                    f"and {state[name].dtype} by config.json: take the config and the weights from one model"
                )
        if differing := [at.key for at in copies[1:] if not torch.equal(at.read(), copies[0].read())]:
            raise ValueError(
                f"config.json ties {copies[0].key!r} and {differing[0]!r}, so they are one weight, but the files in "
                f"{str(path)!r} have different values for them: set tie_word_embeddings to false, or drop one"
            )
    return FolderWeights({name: copies[0] for name, copies in places.items() if copies})


def _some(names: Sequence[str]) -> str:
    """``3 tensors ('a', 'b', ...)``, or ``nothing``."""
    if not names:
        return "nothing"
    more = ", ..." if len(names) > 4 else ""
    return (
        f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({', '.join(repr(name[:80]) for name in names[:4])}{more})"
    )


def _stored(folder: Path) -> dict[str, Stored]:
    """The tensors in a folder's files, by name."""
    if os.path.lexists(folder / SINGLE):
        return _tensors([_file(folder, SINGLE)])
    if not os.path.lexists(folder / INDEX):
        raise ValueError(
            f"neither {SINGLE} nor {INDEX} in {str(folder)!r}: convert other formats first, as "
            f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers does"
        )
    index = _file(folder, INDEX)
    try:
        match parsed(contents(index, LARGEST_INDEX).decode()):
            case {"weight_map": dict(places)} if all(isinstance(name, str) for name in places.values()):
                names = sorted(set(places.values()))
            case _:
                raise ValueError("it has no weight_map from tensors to files")
        files = {name: _file(folder, name) for name in names}
    except ValueError as error:
        raise ValueError(f"cannot read {str(index)!r}: {error}") from error
    stored = _tensors(list(files.values()))
    for key, name in places.items():
        if key not in stored or stored[key].file.place != files[name]:
            raise ValueError(
                f"{str(index)!r} says that {key[:80]!r} is in {name[:80]!r}, and it is not: copy both again"
            )
    return stored


def _tensors(files: Sequence[Folder]) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for place in files:
        file = TensorFile(place)
        try:
            keys = list(file.entries)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the weights in {str(place)!r}: {error}; copy the file again") from error
        for key in keys:
            if key in stored:
                raise ValueError(f"{key[:80]!r} is in {str(stored[key].file.place)!r} and in {str(place)!r}: drop one")
            stored[key] = Stored(file, key)
    return stored


def _file(folder: Path, name: str) -> Folder:
    """A file of weights in a folder, past links; ValueError for a name that leads, or a link that leads, elsewhere."""
    if not FILE.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name of a file in the folder")
    return Folder(_inside(folder, name))


def _inside(folder: Path, name: str) -> Path:
    """The file itself, past links; ValueError for a link out of the folder.

    In the cache of Hugging Face, ``snapshots/9f3c/model.safetensors`` is a link into ``blobs``.
    """
    home, real = folder.resolve(), Path(os.path.realpath(folder / name))
    blobs = home.parent.with_name("blobs") if home.parent.name == "snapshots" else home
    if real.parent not in ((home / name).parent, blobs):
        raise ValueError(f"{str(folder / name)!r} is a link out of its folder, to {str(real)!r}: copy the file instead")
    return real


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
            copied.write_bytes(read_file(file, "what is copied,", LARGEST_COPIED))
        partial.rename(folder)


def copied_files(source: str | Path | None) -> dict[str, Path]:
    """What an export copies from a model's folder, by its name there; looked at before a run, and again at its end.

    Raises:
        ValueError: one is a link out of the folder, no plain file, or too large.
    """
    if source is None:
        return {}
    home, found = Path(source), dict[str, Path]()
    for name in sorted({str(file.relative_to(home)) for pattern in COPIED for file in home.glob(pattern)}):
        if not (home / name).is_dir():  # a folder LICENSES is none of the files LICENSE*
            found[name] = _inside(home, name)
            check_readable(found[name], "what is copied,", LARGEST_COPIED)
    return found


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


def _write_config(folder: Path, model: Any, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
