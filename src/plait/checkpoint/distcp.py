"""A folder of torch.distributed.checkpoint as tensors and values by their paths, read without running anything.

    .metadata        a pickle: keys, shapes, chunks, and where in which file each lies
    __0_0.distcp     records end to end, each a zip as torch.save writes it: data.pkl | data/0, the bytes of a tensor

    ("model", "blocks.0.weight")                      a tensor, put together from its chunks
    ("optim", "param_groups", 0, "lr")                a value

Pickles are read by ``pickled``.  Nothing is allocated by what they say: a tensor is a view of a file with its bytes.
"""

import io
import math
import mmap
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from plait.checkpoint.folder import Folder
from plait.checkpoint.manifest import DTYPES, LARGEST, check_tiling
from plait.checkpoint.pickled import Made, check_size, unpickled
from plait.checkpoint.saved import Whole
from plait.table.layout import Region, extent, inside, overlap

METADATA = ".metadata"
FILE = re.compile(r"\w[\w.-]*\.distcp")
_OWN = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
METADATA_NAMES = {
    *(
        _OWN + name
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata")
    ),
    *(_OWN + name for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *(f"torch.{name}" for name in DTYPES),
    *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict", _STORAGE_INFO),
    *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
}
"""What torch 2.13 writes in ``.metadata``."""
STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in (
        *(("Float", torch.float32), ("Double", torch.float64), ("Half", torch.float16), ("BFloat16", torch.bfloat16)),
        *(("Long", torch.int64), ("Int", torch.int32), ("Short", torch.int16), ("Char", torch.int8)),
        *(("Byte", torch.uint8), ("Bool", torch.bool)),
        *(("ComplexFloat", torch.complex64), ("ComplexDouble", torch.complex128)),
    )
}
_TENSOR = "torch._utils._rebuild_tensor_v2"
RECORD_NAMES = {_TENSOR, "collections.OrderedDict", "torch.Size", *STORAGES}
"""What torch.save writes for a tensor, and for lists and dicts of them."""
CHUNK = 1 << 20
MOST_ENTRIES = 1 << 12
"""Files in the zip of one record: a tensor has seven."""


@dataclass(frozen=True)
class Misread:
    """Stands for an entry that is not understood."""

    reason: str


@dataclass(frozen=True)
class Strided:
    """A tensor as it lies in a file."""

    file: Path
    dtype: torch.dtype
    begin: int
    """The byte of its first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""

    def read(self, region: Region) -> Tensor:
        """A block, in memory of its own."""
        if not math.prod(extent(region)):
            return torch.empty(extent(region), dtype=self.dtype)
        kind = np.dtype("c16" if self.dtype.itemsize == 16 else f"u{self.dtype.itemsize}")
        with _opened(self.file) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            view = np.ndarray(self.shape, kind, whole, self.begin, self.strides)
            block = np.array(view[tuple(slice(*ends) for ends in region)])
            del view
        return torch.from_numpy(block).view(self.dtype)


def read_folder(path: Path) -> dict[tuple[str | int, ...], Any]:
    """Every entry by its path: a ``Whole`` tensor, a value, or a ``Misread``.

    Raises:
        ValueError: it is no such folder, is damaged, or names what torch does not write.
    """
    file = path / METADATA
    if not file.exists() and not file.is_symlink():
        raise ValueError(f"{str(path)!r} is no folder of torch.distributed.checkpoint: it has no {METADATA}")
    with _opened(file) as stream:
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"{str(file)!r} has more than {LARGEST} bytes")
    try:
        keys, chunks = _keys_and_places(unpickled(data, METADATA_NAMES))
        entries: dict[tuple[str | int, ...], Any] = {}
        for (name, place), kind in keys.items():
            if place in entries:
                raise ValueError(f"two keys have the path {place}")
            entries[place] = _entry(path, name, kind, chunks.get(name, {}))
        size = sum(file.lstat().st_size for file in path.glob("*.distcp"))
        if sum(one.nbytes for one in entries.values() if isinstance(one, Whole)) > 2 * size:  # tied weights lie once
            raise ValueError(f"it speaks of far more bytes than its files have, {size}")
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error
    return entries


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A plain file to read; ValueError for anything else."""
    with Folder(path).opened() as file, os.fdopen(os.dup(file.number), "rb") as stream:
        yield stream


def _keys_and_places(made: Any) -> tuple[dict[tuple[str, tuple[Any, ...]], Any], dict[str, dict[Any, Made]]]:
    """(what each key with its path is, where the bytes of each key are by offsets)."""
    match made:
        case Made(name, _, {"state_dict_metadata": dict(kinds), "planner_data": planned, "storage_data": dict(stored)}):
            if name != _OWN + "Metadata":
                raise ValueError("its metadata is another object")
        case _:
            raise ValueError("its metadata has not the fields of a Metadata")
    paths = planned if type(planned) is dict else {}
    keys = {}
    for name, kind in kinds.items():
        place = paths.get(name, (name,))
        simple = type(place) is tuple and 0 < len(place) <= 64 and all(type(one) in (str, int) for one in place)
        if type(name) is not str or not simple:
            raise ValueError(f"the key {str(name)[:80]!r} has no path")
        keys[name, place] = kind
    chunks: dict[str, dict[Any, Made]] = {}
    for index, info in stored.items():
        match index:
            case Made(_, _, {"fqn": str(name), **rest}) if index.name == _OWN + "MetadataIndex":
                offset = rest.get("offset")
                chunks.setdefault(name, {})[None if offset is None else _sizes(offset)] = info
            case _:
                raise ValueError("its storage data has another key than a MetadataIndex")
    return keys, chunks


def _sizes(made: Any) -> tuple[int, ...]:
    """A torch.Size of numbers that can be one."""
    match made:
        case Made("torch.Size", (tuple(sizes),)) if all(type(n) is int and n >= 0 for n in sizes) and len(sizes) <= 64:
            return tuple(sizes)
        case Made("torch.Size", (list(sizes),)) if all(type(n) is int and n >= 0 for n in sizes) and len(sizes) <= 64:
            return tuple(sizes)
    raise ValueError("a size in it is not one")


def _entry(folder: Path, name: str, kind: Any, places: Mapping[Any, Made]) -> Any:
    match kind:
        case Made(own, _, {"properties": Made(_, _, (Made(dtype), *_)), "size": size, "chunks": list(chunks)}) if (
            own == _OWN + "TensorStorageMetadata"
        ):
            known = DTYPES.get(dtype.removeprefix("torch."))
            if known is None:
                raise ValueError(f"{name[:80]!r} is of {dtype}, which is not read")
            return _tensor(folder, name, known, _sizes(size), chunks, places)
        case Made(own) if own == _OWN + "BytesStorageMetadata" and set(places) == {None}:
            try:
                return _value(*_record(folder, places[None]))
            except ValueError as error:
                return Misread(str(error))
    raise ValueError(f"the entry {name[:80]!r} is neither a tensor nor an object")


def _tensor(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    chunks: Sequence[Any],
    places: Mapping[Any, Made],
) -> Whole:
    parts: dict[Region, Whole] = {}
    for chunk in chunks:
        match chunk:
            case Made(_, _, {"offsets": offsets, "sizes": sizes}) if chunk.name == _OWN + "ChunkStorageMetadata":
                start, size = _sizes(offsets), _sizes(sizes)
            case _:
                raise ValueError(f"a chunk of {name[:80]!r} is another object")
        region = tuple((a, a + n) for a, n in zip(start, size, strict=False))
        if not len(start) == len(size) == len(shape) or any(b > n for (_, b), n in zip(region, shape, strict=True)):
            raise ValueError(f"a chunk of {name[:80]!r} is no region of its shape {shape}")
        if not math.prod(size) or region in parts:
            continue
        if start not in places:
            raise ValueError(f"a chunk of {name[:80]!r} at {start} lies in no file")
        part = _value(*_record(folder, places[start]))
        if type(part) is not Whole or (part.dtype, part.shape) != (dtype, size):
            raise ValueError(f"a chunk of {name[:80]!r} at {start} is not the tensor that the metadata says")
        parts[region] = part
    check_tiling(name, shape, parts)

    def read(region: Region) -> Tensor:
        block = torch.empty(extent(region), dtype=dtype)
        for own, part in parts.items():
            if (common := overlap(region, own)) is not None:
                here = tuple(slice(*ends) for ends in inside(common, region))
                block[here] = part.read(inside(common, own))
        return block

    return Whole(dtype, shape, read)


# ---- records --------------------------------------------------------------------------------------------------------


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.at = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, offset + (0, self.at, self.length)[whence])
        return self.at

    def read(self, size: int = -1) -> bytes:
        self.file.seek(self.begin + self.at)
        left = max(0, self.length - self.at)
        data = self.file.read(left if size is None or size < 0 else min(size, left))
        self.at += len(data)
        return data


@dataclass(frozen=True)
class _Archive:
    """The files in one record, none of them compressed: where each begins, and its size."""

    file: Path
    places: Mapping[str, tuple[int, int]]


@contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, NotImplementedError, EOFError, struct.error, OSError) as error:
        raise ValueError(f"a record is no zip of torch.save: {error}") from error


def _record(folder: Path, info: Any) -> tuple[_Archive, Any]:
    """The files of a record, and its pickle."""
    match info:
        case Made(name, _, {"relative_path": str(own), "offset": int(begin), "length": int(length), **rest}) if (
            name == _STORAGE_INFO
        ):
            pass
        case _:
            raise ValueError("a place in its storage data is another object")
    if not FILE.fullmatch(own):
        raise ValueError(f"{own[:80]!r} is not the name of a file beside {METADATA}")
    if rest.get("transform_descriptors"):
        raise ValueError("its records are compressed: save it without extensions")
    with _opened(folder / own) as file, _as_value_error():
        size = file.seek(0, io.SEEK_END)
        if not 0 <= begin <= begin + length <= size:
            raise ValueError(f"{own!r} has {size} bytes, and a record lies at {begin} to {begin + length}")
        with zipfile.ZipFile(_Window(file, begin, length)) as archive:
            entries = archive.infolist()
        if len(entries) > MOST_ENTRIES or any(one.compress_type or one.flag_bits & 1 for one in entries):
            raise ValueError("a record has too many files, or compressed ones")
        places = {}
        for one in entries:
            file.seek(begin + one.header_offset)
            header = file.read(30)
            start = begin + one.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
            if header[:4] != b"PK\3\4" or start + one.file_size > begin + length:
                raise ValueError("a record's files do not lie in it")
            if one.CRC not in (0, _checksum(file, start, one.file_size)):  # 0: torch was told to write none
                raise ValueError(f"{own!r} is damaged: the CRC-32 of {one.filename[:80]!r} at byte {start} is another")
            places[one.filename.partition("/")[2]] = start, one.file_size
        if "data.pkl" not in places:
            raise ValueError("a record has no data.pkl")
        program, order = (_bytes(file, places.get(one, (0, 6)), LARGEST) for one in ("data.pkl", "byteorder"))
    if "byteorder" in places and order != b"little":
        raise ValueError("a record was written on a machine of another byte order")
    return _Archive(folder / own, places), unpickled(program, RECORD_NAMES)


def _checksum(file: BinaryIO, begin: int, size: int) -> int:
    file.seek(begin)
    checksum = 0
    for start in range(0, size, CHUNK):
        checksum = zlib.crc32(file.read(min(CHUNK, size - start)), checksum)
    return checksum


def _bytes(file: BinaryIO, place: tuple[int, int], most: int) -> bytes:
    file.seek(place[0])
    if place[1] > most:
        raise ValueError(f"a record's pickle has more than {most} bytes")
    return file.read(place[1])


def _value(archive: _Archive, made: Any) -> Any:
    """An object of a record, in which tensors are ``Whole``."""
    check_size(made)

    def plain(one: Any) -> Any:
        match one:
            case dict() if not any(isinstance(key, Made | bytes) for key in one):
                return {key: plain(inside) for key, inside in one.items()}
            case list() | tuple():
                return type(one)(map(plain, one))
            case Made("torch.Size", (tuple(sizes),)):
                return tuple(sizes)
            case Made(name, (Made("", (("storage", Made(kind), str(key), _, int(count)),)), int(first), tuple(shape),
                             tuple(strides), *_)) if name == _TENSOR and kind in STORAGES:  # fmt: skip
                return _strided(archive, STORAGES[kind], key, count, first, shape, strides)
            case Made() | bytes() | dict():
                raise ValueError(f"it has {one.name if isinstance(one, Made) else 'bytes'}, which is not read")
        return one

    return plain(made)


def _strided(
    archive: _Archive,
    dtype: torch.dtype,
    key: str,
    count: int,
    first: int,
    shape: tuple[Any, ...],
    strides: tuple[Any, ...],
) -> Whole:
    begin, size = archive.places.get(f"data/{key}", (0, -1))
    numbers = (count, first, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > 64 or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a tensor in it has no right shape")
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if count * dtype.itemsize > size or math.prod(shape) > count or (math.prod(shape) and last >= count):
        raise ValueError(f"a tensor of shape {shape} in it does not lie in its {size} bytes")
    own = Strided(
        archive.file, dtype, begin + first * dtype.itemsize, shape, tuple(n * dtype.itemsize for n in strides)
    )
    return Whole(dtype, shape, own.read)
