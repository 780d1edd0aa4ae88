"""A folder of torch.distributed.checkpoint as tensors and values by their paths; none of its code runs.

    .metadata        keys, shapes, chunks, and each one's place: torch's own ``Metadata`` (see ``foreign_pickle``)
    __0_0.distcp     records end to end, each written by torch.save, read by torch.load(weights_only=True)

    ("model", "blocks.0.weight")                      a tensor, assembled from its chunks
    ("optim", "param_groups", 0, "lr")                a value

Torch's planner would leave gaps between chunks as they are in memory, unpickle values without ``weights_only``, and see
no flipped bit, so every record is checked here first: CRC-32, dtype and shape.  A whole tensor is in memory at a time.
"""

import io
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as form
from torch.distributed.checkpoint.filesystem import _StorageInfo

from plait.checkpoint.folder import Folder
from plait.checkpoint.manifest import DTYPES, LARGEST, check_tiling
from plait.checkpoint.places import contents
from plait.checkpoint.stored import Stored, assembled
from plait.messages.progress import counted
from plait.run.formats.foreign_pickle import unpickled
from plait.table.layout import Region

METADATA = ".metadata"
FILE = re.compile(r"\w[\w.-]*\.distcp")
PIECE = 1 << 20
DEEPEST, MOST_VALUES = 64, 1 << 20
"""Bounds of a user's object, where a shared value counts each time."""

Keys: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Misread:
    """An entry that is not understood."""

    reason: str


def read_folder(path: Path) -> dict[Keys, Any]:
    """Every entry by its path: a ``Stored`` tensor, a value, or a ``Misread``.

    Raises:
        ValueError: it is no such folder, is damaged, or names what torch does not write.
    """
    if not (path / METADATA).exists() and not (path / METADATA).is_symlink():
        raise ValueError(f"{str(path)!r} is no folder of torch.distributed.checkpoint: it has no {METADATA}")
    try:
        return _Entries(path, unpickled(contents(Folder(path / METADATA), LARGEST))).all()
    except (ValueError, AttributeError) as error:  # a damaged pickle may leave an object without its fields
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


@dataclass
class _Entries:
    folder: Path
    meta: Any
    places: dict[tuple[str, Any], _StorageInfo] = field(default_factory=dict)
    """The record of each chunk, by key and offsets."""
    kept: tuple[str, Tensor] | None = None
    """The tensor that was read last."""

    def all(self) -> dict[Keys, Any]:
        match self.meta:
            case form.Metadata(state_dict_metadata=dict(kinds), planner_data=planned, storage_data=dict(stored)):
                paths: Mapping[Any, Any] = planned if type(planned) is dict else {}
            case _:
                raise ValueError("its metadata has not the fields of a Metadata")
        for index, info in stored.items():
            if type(index) is not form.MetadataIndex or type(info) is not _StorageInfo:
                raise ValueError("its storage data is not a place for each MetadataIndex")
            self.places[index.fqn, index.offset] = info
        found: dict[Keys, Any] = {}
        for name, kind in counted("records read", list(kinds.items())):
            place = paths.get(name, (name,))
            simple = type(place) is tuple and 0 < len(place) <= 64 and all(type(one) in (str, int) for one in place)
            if type(name) is not str or not simple:
                raise ValueError(f"the key {str(name)[:80]!r} has no path")
            if place in found:
                raise ValueError(f"two keys have the path {place}")
            found[place] = self.entry(name, kind)
        said = sum(one.nbytes for one in found.values() if isinstance(one, Stored))
        there = sum(file.lstat().st_size for file in self.folder.glob("*.distcp"))
        if said > 2 * there:  # tied weights may share a record
            raise ValueError(f"its tensors would have {said} bytes, and its files have {there}")
        return found

    def entry(self, name: str, kind: Any) -> Any:
        if type(kind) is form.BytesStorageMetadata and (name, None) in self.places:
            try:
                return _plain(self.record(self.places[name, None]))
            except ValueError as error:
                return Misread(str(error))
        match kind:
            case form.TensorStorageMetadata(properties=form.TensorProperties(dtype=dtype), chunks=list(chunks)):
                return self.tensor(name, dtype, _sizes(kind.size), chunks)
        raise ValueError(f"the entry {name[:80]!r} is neither a tensor nor an object")

    def tensor(self, name: str, dtype: Any, shape: tuple[int, ...], chunks: list[Any]) -> Stored:
        """A tensor whose records have all been read and checked once."""
        if dtype not in DTYPES.values():
            raise ValueError(f"{name[:80]!r} is of {dtype}, which is not among what is read here")
        parts: dict[Region, _StorageInfo] = {}
        for chunk in chunks:
            if type(chunk) is not form.ChunkStorageMetadata:
                raise ValueError(f"a chunk of {name[:80]!r} is another object")
            start, size = _sizes(chunk.offsets), _sizes(chunk.sizes)
            region = tuple((a, a + n) for a, n in zip(start, size, strict=False))
            if not len(start) == len(size) == len(shape) or any(b > n for (_, b), n in zip(region, shape, strict=True)):
                raise ValueError(f"a chunk of {name[:80]!r} is no region of its shape {shape}")
            if math.prod(size) and region not in parts:
                if (name, chunk.offsets) not in self.places:
                    raise ValueError(f"a chunk of {name[:80]!r} at {start} has no record")
                parts[region] = self.places[name, chunk.offsets]
                self.chunk(name, dtype, region, parts[region])
        check_tiling(name, shape, parts)
        fills = ((region, partial(self.fill, name, dtype, region, info)) for region, info in parts.items())
        whole = assembled(dtype, shape, fills)

        def fill(region: Region, into: Tensor) -> None:
            if self.kept is None or self.kept[0] != name:
                self.kept = name, whole.read()
            into.copy_(self.kept[1][tuple(slice(*ends) for ends in region)])

        return Stored(dtype, shape, fill)

    def fill(self, name: str, dtype: Any, own: Region, info: _StorageInfo, region: Region, into: Tensor) -> None:
        into.copy_(self.chunk(name, dtype, own, info)[tuple(slice(*ends) for ends in region)])

    def chunk(self, name: str, dtype: Any, region: Region, info: _StorageInfo) -> Tensor:
        found = self.record(info)
        shape = tuple(stop - start for start, stop in region)
        if type(found) is not Tensor or found.dtype != dtype or tuple(found.shape) != shape or found.is_sparse:
            raise ValueError(f"a chunk of {name[:80]!r} is not the tensor that the metadata says")
        return found

    def record(self, info: _StorageInfo) -> Any:
        """The object in a record, which torch makes of tensors and plain values alone."""
        own, begin, length = info.relative_path, info.offset, info.length
        if type(own) is not str or not FILE.fullmatch(own):
            raise ValueError(f"{str(own)[:80]!r} is not the name of a file beside {METADATA}")
        if vars(info).get("transform_descriptors"):
            raise ValueError("its records are compressed: save it without extensions")
        with Folder(self.folder / own).opened() as file:
            if not (type(begin) is type(length) is int and 0 <= begin <= begin + length <= file.size):
                raise ValueError(f"{own!r} has {file.size} bytes, and its metadata has a record at {begin}")
            file.read(begin, memoryview(data := bytearray(length)))
        try:
            _check_zip(io.BytesIO(data))
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{own!r} is damaged at byte {begin}: {error}") from error
        except ValueError:
            raise
        except Exception as error:  # torch raises errors of many types
            raise ValueError(f"a record is refused by torch.load(weights_only=True): {_reason(error)}") from error


def _check_zip(record: io.BytesIO) -> None:
    with zipfile.ZipFile(record) as archive:
        for one in archive.infolist():
            if one.compress_type or one.flag_bits & 1:
                raise ValueError("a record has compressed files")
            if one.CRC:  # zero: torch was asked to write none
                with archive.open(one) as part:
                    while part.read(PIECE):
                        pass


def _reason(error: Exception) -> str:
    """The cause in torch's long text, which also explains how to load unsafely."""
    if found := re.search(r"(?:WeightsUnpickler error: )?((Unsupported|Trying)[^\n]*?)(\. Please|\n|$)", str(error)):
        return found[1][:300]
    return "it has more than tensors and plain values" if "weights_only" in str(error) else str(error)[:300]


def _sizes(given: object) -> tuple[int, ...]:
    if type(given) is not torch.Size or len(given) > 64 or any(one < 0 for one in given):
        raise ValueError("a size in it is not one")
    return tuple(given)


def _plain(value: Any) -> Any:
    """A user's object of plain values, with its tensors as ``Stored``."""
    left = iter(range(MOST_VALUES))

    def plain(one: Any, depth: int) -> Any:
        if depth > DEEPEST or next(left, None) is None:
            raise ValueError(f"an object is nested more than {DEEPEST} deep, or has more than {MOST_VALUES} values")
        if type(one) is Tensor and one.layout is torch.strided and one.dtype in DTYPES.values():
            return _in_memory(one)
        if isinstance(one, dict):
            return {_key(key): plain(inside, depth + 1) for key, inside in one.items()}
        if isinstance(one, list | tuple):
            items = [plain(inside, depth + 1) for inside in one]
            return items if isinstance(one, list) else tuple(items)
        if one is None or type(one) in (bool, int, float, str):
            return one
        raise ValueError(f"it has a {type(one).__name__}, which is not read")

    return plain(value, 0)


def _key(key: Any) -> Any:
    if not isinstance(key, str | int | float | None):
        raise ValueError(f"it has a {type(key).__name__} as a key, which is not read")
    return key


def _in_memory(tensor: Tensor) -> Stored:
    def fill(region: Region, into: Tensor) -> None:
        into.copy_(tensor[tuple(slice(*ends) for ends in region)])

    return Stored(tensor.dtype, tuple(tensor.shape), fill)
