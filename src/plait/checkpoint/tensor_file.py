"""A safetensors file, read by ranges of bytes; what its header says is held against its size before anything is read.

8 bytes: the header's length | header: name, dtype, shape, bytes a..b | bytes

whole  [6, 4], asked for [1:5, 1:3]     . . . .
                                        . # # .     long rows: a range for each; short ones: one range
                                        . # # .     for as many as fit into a chunk, with what lies between
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.storage import ByteSource, Storage
from plait.table.layout import Region, blocks, extent, inside

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
    torch.complex64: "C64",
}
"""What safetensors calls dtypes."""

REAL = {torch.complex128: torch.float64}
"""For which safetensors has no name: they are real ones in a file, with a last dim of 2."""
SAVABLE = (*NAMES, *REAL)

_OTHERS = {"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64}
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
READ = {**{name: dtype for dtype, name in NAMES.items()}, **_OTHERS, **_FLOAT8}

LONGEST = 100_000_000
"""Bytes of a header, as for every reader of safetensors."""
DIMS = 64
LARGEST = 1 << 63
MOST = 1 << 22
"""Elements to convert at a time: a request worth its way to an object store, and little beside a rank's pieces."""

Check = Callable[[Region, Tensor], None]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file, and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class TensorFile:
    """A file, whose header is read once."""

    place: Storage

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Its tensors, by name; ValueError where it is no safetensors file."""
        with self.place.opened() as file:
            try:
                return _entries(file)
            except ValueError as error:
                raise ValueError(f"{str(self.place)!r} is no safetensors file: {error}") from error

    @contextmanager
    def opened(self) -> Iterator["OpenTensors"]:
        """To read several blocks."""
        with self.place.opened() as file:
            yield OpenTensors(self, file)


@dataclass(frozen=True)
class OpenTensors:
    """A file that is open."""

    file: TensorFile
    source: ByteSource

    def read(self, key: str, region: Region, into: Tensor, check: Check | None = None) -> None:
        """Fill a tensor with a block: where it has the entry's dtype, with nothing in between.

        Args:
            into: of the region's extent, in any dtype, on any device.
            check: is given what was read, in the entry's dtype, with the region that it is.
        """
        entry = self.file.entries[key]
        if into.is_complex() and not entry.dtype.is_complex:
            into, region = torch.view_as_real(into), (*region, (0, 2))
        straight = into.dtype == entry.dtype and into.device.type == "cpu"
        for part in (region,) if straight else blocks(region, MOST):
            here = into[tuple(slice(*ends) for ends in inside(part, region))]
            value = here if straight else torch.empty(extent(part), dtype=entry.dtype)
            _read(self.source, self.file.place, entry.start, entry.shape, part, value)
            if check is not None:
                check(part, value)
            if not straight:
                here.copy_(value)


def _read(source: ByteSource, place: Storage, start: int, shape: tuple[int, ...], region: Region, into: Tensor) -> None:
    """From a tensor whose bytes begin at ``start``."""
    if not into.numel():
        return
    row = math.prod(shape[1:]) * into.itemsize
    first, last = region[0] if region else (0, 1)
    if into.is_contiguous() and region[1:] == tuple((0, size) for size in shape[1:]):
        source.read(start + first * row, into.view(-1).view(torch.uint8).numpy().data)
    elif row > place.gap or last - first == 1:
        for index in range(first, last):
            _read(source, place, start + index * row, shape[1:], region[1:], into[index - first])
    else:
        count = min(max(1, place.chunk // row), last - first)
        rows = torch.empty((count, *shape[1:]), dtype=into.dtype)
        for index in range(first, last, count):
            part = rows[: last - index]
            source.read(start + index * row, part.reshape(-1).view(torch.uint8).numpy().data)
            inner = tuple(slice(a, b) for a, b in region[1:])
            into[index - first : index - first + len(part)] = part[(slice(None), *inner)]


def _entries(file: ByteSource) -> dict[str, TensorEntry]:
    if file.size < 8:
        raise ValueError(f"it has {file.size} bytes")
    file.read(0, memoryview(length := bytearray(8)))
    begin = 8 + int.from_bytes(length, "little")
    if begin > min(file.size, LONGEST + 8):
        raise ValueError(f"its header would have {begin - 8} bytes, and the file has {file.size}")
    file.read(8, memoryview(text := bytearray(begin - 8)))
    given = parsed(text.decode())
    if not isinstance(given, dict) or not isinstance(given.pop("__metadata__", {}), dict):
        raise ValueError("its header is no table of tensors")
    entries: dict[str, tuple[int, TensorEntry]] = {}
    for name, told in given.items():
        match told:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [start, end], **rest} if not rest:
                if kind not in READ:
                    raise ValueError(f"{name[:80]!r} is of dtype {kind[:20]!r}, which plait does not read")
                bytes_there = math.prod(shape) * READ[kind].itemsize if is_shape(shape) else -1
                if is_size(start) and is_size(end) and end - start == bytes_there:
                    entries[name] = end, TensorEntry(READ[kind], tuple(shape), begin + start)
                    continue
        raise ValueError(f"the entry of {name[:80]!r} is not a dtype, a shape and as many bytes")
    at = begin
    for name, (end, entry) in sorted(entries.items(), key=lambda item: (item[1][1].start, begin + item[1][0])):
        if entry.start != at:
            raise ValueError(f"the bytes of {name[:80]!r} begin at {entry.start}, and those before it end at {at}")
        at = begin + end
    if at != file.size:
        raise ValueError(f"its tensors end at byte {at}, and it has {file.size}")
    return {name: entry for name, (_, entry) in entries.items()}


def parsed(text: str) -> Any:
    """JSON; ValueError for what has a name twice in an object, NaN, or too deep a nesting."""
    try:
        return json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def is_size(value: object) -> bool:
    """A number of elements or bytes."""
    return type(value) is int and 0 <= value < LARGEST


def is_shape(value: object) -> bool:
    """A list of sizes, of no more elements than there are numbers."""
    if not isinstance(value, list) or len(value) > DIMS or not all(map(is_size, value)):
        return False
    return math.prod(value) < LARGEST


def in_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the shape that a tensor has in a file."""
    return (REAL[dtype], (*shape, 2)) if dtype in REAL else (dtype, shape)


def safetensors_header(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], sizes: Mapping[str, int]
) -> tuple[bytes, dict[str, int], int]:
    """A file's beginning, where in the file each tensor starts, and where the last one ends.

    Wide dtypes come first, which keeps every tensor aligned; the header is padded to 8 bytes for the same reason.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: -item[1][1].itemsize):
        dtype, shape = in_file(dtype, shape)
        entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    starts = {name: begin + entries[name]["data_offsets"][0] for name in shapes}
    return len(text).to_bytes(8, "little") + text, starts, begin + end
