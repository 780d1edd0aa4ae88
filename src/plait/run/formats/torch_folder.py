"""Reads a folder of torch.distributed.checkpoint with torch's own reader; none of the folder's code runs.

    .metadata        keys, shapes, chunks, and each one's place: torch's own ``Metadata`` (see ``foreign_pickle``)
    __0_0.distcp     records end to end, each written by torch.save, read by torch.load(weights_only=True)

    ("model", "blocks.0.weight")                      a tensor
    ("optim", "param_groups", 0, "lr")                a value

Torch's reader sees no flipped bit, and leaves gaps between chunks as they are in memory, so both are checked first.
"""

import io
import math
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from plait.checkpoint.files.reading import read_file
from plait.checkpoint.folder import opened
from plait.checkpoint.manifest import DTYPES, LARGEST, check_tiling
from plait.checkpoint.values import encoded
from plait.messages.progress import counted
from plait.run.formats.foreign_pickle import unpickled

METADATA = ".metadata"
FILE = re.compile(r"\w[\w.-]*\.distcp")
PIECE = 1 << 20

Keys: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Misread:
    """An entry that is not understood."""

    reason: str


def read_folder(path: Path) -> dict[Keys, Any]:
    """Every entry by its path: a tensor, a value, or a ``Misread``, all in memory.  ValueError if it is not such a
    folder, is damaged, or names objects that torch does not write."""
    if not (path / METADATA).exists() and not (path / METADATA).is_symlink():
        raise ValueError(f"{str(path)!r} is not a folder of torch.distributed.checkpoint: it has no {METADATA}")
    try:
        meta = unpickled(read_file(path / METADATA, "the metadata", LARGEST, links=False))
        if not isinstance(meta, Metadata) or not isinstance(meta.storage_data, dict):
            raise ValueError("its metadata lacks fields of a Metadata")
        _check_records(path, meta)
        _check_tensors(path, meta)
        entries = _read(path, meta)
        paths = meta.planner_data if isinstance(meta.planner_data, dict) else {}
        found = {tuple(paths.get(name, (name,))): value for name, value in entries.items()}
        if len(found) < len(entries):
            raise ValueError("two keys have the same path")
    except Exception as error:  # a damaged folder leads to errors of many types
        said = str(error) if isinstance(error, ValueError) else _reason(error)
        raise ValueError(f"{str(path)!r} cannot be read: {said or repr(error)}") from error
    return found


def _check_records(folder: Path, meta: Metadata) -> None:
    """Raises ValueError for a record that is not inside a file of this folder, or has another CRC-32."""
    for info in counted("records read", list((meta.storage_data or {}).values())):
        own, begin, length = info.relative_path, info.offset, info.length
        if type(own) is not str or not FILE.fullmatch(own):
            raise ValueError(f"{str(own)[:80]!r} is not the name of a file beside {METADATA}")
        if vars(info).get("transform_descriptors"):
            raise ValueError("its records are compressed: save it without extensions")
        with opened(folder / own) as file:
            if not (type(begin) is type(length) is int and 0 <= begin <= begin + length <= file.size):
                raise ValueError(f"{own!r} has {file.size} bytes, and its metadata has a record at {begin}")
            file.read(begin, memoryview(data := bytearray(length)))
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for one in archive.infolist():
                    if one.compress_type or one.flag_bits & 1:
                        raise ValueError("a record has compressed files")
                    if one.CRC:  # zero: torch was set to write none
                        with archive.open(one) as part:
                            while part.read(PIECE):
                                pass
        except zipfile.BadZipFile as error:
            raise ValueError(f"{own!r} is damaged at byte {begin}: {error}") from error


def _check_tensors(folder: Path, meta: Metadata) -> None:
    """Raises ValueError for chunks that leave a gap or overlap, and for more bytes than the files have."""
    said = 0
    for name, kind in meta.state_dict_metadata.items():
        if isinstance(kind, TensorStorageMetadata):
            dtype, shape = kind.properties.dtype, tuple(kind.size)
            if dtype not in DTYPES.values():
                raise ValueError(f"{name[:80]!r} is of {dtype}, which plait does not read")
            regions = [tuple((a, a + n) for a, n in zip(c.offsets, c.sizes, strict=True)) for c in kind.chunks]
            if any(len(region) != len(shape) for region in regions):
                raise ValueError(f"a chunk of {name[:80]!r} is not a region of its shape {shape}")
            check_tiling(name, shape, dict.fromkeys(regions))
            said += math.prod(shape) * dtype.itemsize
    there = sum(file.lstat().st_size for file in folder.glob("*.distcp"))
    if said > 2 * there:  # tied weights may share a record
        raise ValueError(f"its tensors would have {said} bytes, and its files have {there}")


def _read(folder: Path, meta: Metadata) -> dict[str, Any]:
    """Performs torch's load by one process, step by step, so that errors arrive unchanged."""
    state: dict[str, Any] = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype) if isinstance(kind, TensorStorageMetadata) else None
        for name, kind in meta.state_dict_metadata.items()
    }
    reader, planner = FileSystemReader(folder), _SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader.set_up_storage_reader(meta, is_coordinator=True)
    planner.set_up_planner(state, meta, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return state


class _SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads only tensors and plain values; torch's planner would run the objects that a pickle names."""
        try:
            found = torch.load(value, map_location="cpu", weights_only=True)
            encoded(found, {})
        except Exception as error:  # torch raises errors of many types
            found = Misread(_reason(error))
        self.state_dict[read_item.dest_index.fqn] = found


def _reason(error: Exception) -> str:
    """The cause in torch's long text, which also explains how to load unsafely."""
    text = str(error)
    if found := re.search(r"(?:WeightsUnpickler error: )?((Unsupported|Trying)[^\n]*?)(\. Please|\n|$)", text):
        return f"refused by torch.load(weights_only=True): {found[1][:300]}"
    return "it has more than tensors and plain values" if "weights_only" in text else " ".join(text.split())[:300]
