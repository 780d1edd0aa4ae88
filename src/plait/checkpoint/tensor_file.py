"""A safetensors file: read by ranges of bytes, written in one pass.

8 bytes: the header's length | header: name, dtype, shape, bytes a..b | bytes

The header is checked against the file's size before anything else is read.

whole  [6, 4], asked for [1:5, 1:3]     . . . .
                                        . # # .     long rows: a range for each; short ones: one range
                                        . # # .     for as many as fit into a chunk, gaps included
"""

import json
import math
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from plait.checkpoint.folder import OpenFile, created, opened
from plait.checkpoint.hashing import Hasher
from plait.checkpoint.manifest import NAMES, in_file, is_shape, is_size, parsed
from plait.table.region import Region, blocks, extent, inside

_OTHERS = {"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64}
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
READ = {**{name: dtype for dtype, name in NAMES.items()}, **_OTHERS, **_FLOAT8}

LONGEST = 100_000_000
"""The most bytes of a header, the limit of every reader of safetensors."""
MOST = 1 << 22
"""The number of elements to convert at a time."""
GAP = 1 << 16
"""The number of bytes up to which reading is cheaper than skipping."""
CHUNK = 1 << 20
"""The number of bytes to read at a time."""

ToWrite: TypeAlias = tuple[tuple[int, ...], torch.dtype, Iterable[Tensor]]
"""The shape, the dtype, and the values as contiguous blocks, in order."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file, and the position of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class TensorFile:
    """A file whose header is read once."""

    path: Path

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """The file's tensors by name; raises ValueError if it is not a safetensors file."""
        with opened(self.path) as file:
            try:
                return _entries(file)
            except ValueError as error:
                raise ValueError(f"{str(self.path)!r} is no safetensors file: {error}") from error

    def fill(self, key: str, region: Region, into: Tensor) -> None:
        """Reads a block into a tensor of its shape, of any dtype, strides and device."""
        entry = self.entries[key]
        if into.is_complex() and not entry.dtype.is_complex:
            into, region = torch.view_as_real(into), (*region, (0, 2))
        straight = into.dtype == entry.dtype and into.device.type == "cpu"
        with opened(self.path) as file:
            for part in (region,) if straight else blocks(region, MOST):
                here = into[tuple(slice(*ends) for ends in inside(part, region))]
                value = here if straight else torch.empty(extent(part), dtype=entry.dtype)
                _read(file, entry.start, entry.shape, part, value)
                if not straight:
                    here.copy_(value)


def _read(source: OpenFile, start: int, shape: tuple[int, ...], region: Region, into: Tensor) -> None:
    """Reads from a tensor whose bytes begin at ``start``."""
    if not into.numel():
        return
    row = math.prod(shape[1:]) * into.itemsize
    first, last = region[0] if region else (0, 1)
    if into.is_contiguous() and region[1:] == tuple((0, size) for size in shape[1:]):
        source.read(start + first * row, bytes_of(into))
    elif row > GAP or last - first == 1:
        for index in range(first, last):
            _read(source, start + index * row, shape[1:], region[1:], into[index - first])
    else:
        count = min(max(1, CHUNK // row), last - first)
        rows = torch.empty((count, *shape[1:]), dtype=into.dtype)
        for index in range(first, last, count):
            part = rows[: last - index]
            source.read(start + index * row, bytes_of(part))
            inner = tuple(slice(a, b) for a, b in region[1:])
            into[index - first : index - first + len(part)] = part[(slice(None), *inner)]


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; its own memory if it is contiguous and on the host."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensor_file(path: Path, tensors: Sequence[ToWrite]) -> tuple[int, str]:
    """Writes tensors under their numbers, and hashes them in a thread at the same time.

    Returns:
        The file's size in bytes and its digest; the disk has the file by then.
    """
    shapes = {str(number): (shape, dtype) for number, (shape, dtype, _) in enumerate(tensors)}
    header, starts, end = safetensors_header(shapes)
    digest, waiting = Hasher(), queue.Queue[memoryview | bytes | None](2)  # the disk may be two blocks ahead

    def hash_all() -> None:
        while (data := waiting.get()) is not None:
            digest.update(data)

    hashing = threading.Thread(target=hash_all, name="plait.hash")
    hashing.start()
    try:
        with created(path) as file:
            for data in _in_order(header, starts, tensors):
                waiting.put(data)
                file.write(data)
    finally:
        waiting.put(None)
        hashing.join()
    return end, digest.hexdigest()


def _in_order(header: bytes, starts: Mapping[str, int], tensors: Sequence[ToWrite]) -> Iterator[bytes | memoryview]:
    yield header
    for key in sorted(starts, key=lambda key: (starts[key], math.prod(tensors[int(key)][0]))):
        for block in tensors[int(key)][2]:
            if block.numel():
                yield bytes_of(block)


def safetensors_header(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> tuple[bytes, dict[str, int], int]:
    """A file's first bytes, the start of each tensor, and the file's size.

    Wide dtypes come first, which keeps every tensor aligned, as does the padding of the header to 8 bytes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: -item[1][1].itemsize):
        size = math.prod(shape) * dtype.itemsize
        dtype, shape = in_file(dtype, shape)
        entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    starts = {name: begin + entries[name]["data_offsets"][0] for name in shapes}
    return len(text).to_bytes(8, "little") + text, starts, begin + end


def _entries(file: OpenFile) -> dict[str, TensorEntry]:
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
    found: list[tuple[int, int, str, TensorEntry]] = []
    for name, told in given.items():
        match told:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [start, end], **rest} if not rest:
                if kind not in READ:
                    raise ValueError(f"{name[:80]!r} is of dtype {kind[:20]!r}, which plait does not read")
                size = math.prod(shape) * READ[kind].itemsize if is_shape(shape) else -1
                if is_size(start) and is_size(end) and end - start == size:
                    found.append(
                        (begin + start, begin + end, name, TensorEntry(READ[kind], tuple(shape), begin + start))
                    )
                    continue
        raise ValueError(f"the entry of {name[:80]!r} is not a dtype, a shape and as many bytes")
    at = begin
    for start, end, name, _ in sorted(found, key=lambda one: one[:2]):
        if start != at:
            raise ValueError(f"the bytes of {name[:80]!r} begin at {start}, and those before it end at {at}")
        at = end
    if at != file.size:
        raise ValueError(f"its tensors end at byte {at}, and it has {file.size}")
    return {name: entry for _, _, name, entry in found}
