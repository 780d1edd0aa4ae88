"""A checkpoint's description: one JSON file, checked field by field before any other file is opened.

    {"sha256":  of the rest,
     "format": 4, "id": "9f3c...", "step": 123,
     "files":   {"rank-00000.safetensors": {"bytes": 4096, "blake3 of 16 MiB parts": "..."}, ...},
     "tensors": {"model/blocks.0.weight": {"dtype": "float32", "shape": [4, 8], "pieces":
                     [{"file": "rank-00000.safetensors", "key": "3", "region": [[0, 2], [0, 8]]}, ...]}, ...},
     "values":  everything but tensors: groups, counters, a user's own (see ``values``)}

It has no paths: a file's name has one form, in the manifest's own folder.  Its sizes are checked against those of the
files before anything is allocated.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch

from plait.checkpoint.hashing import HASH
from plait.table.region import Region, extent

FORMAT = 4
NAME = "manifest.json"
FILE = re.compile(r"rank-[0-9]{5,9}(\.[0-9a-f]{1,32})?\.safetensors")
LARGEST = 1 << 28
"""The most bytes of a manifest."""
DIMS, MOST = 64, 1 << 63
MOST_CORNERS = 1 << 24
"""The most corners of one tensor's pieces, over the cut dims."""
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
"""Names of dtypes in safetensors."""

REAL = {torch.complex128: torch.float64}
"""Dtypes without such a name, stored as real dtypes with a last dim of 2."""
SAVABLE = (*NAMES, *REAL)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAVABLE}
_BEGIN = '{"sha256": "'


@dataclass(frozen=True)
class StoredFile:
    """A file's size and digest."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class StoredPiece:
    """The file and key of one region of a tensor."""

    file: str
    key: str
    region: Region


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, tiled by the regions of its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    id: str
    step: int
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    values: Any

    @cached_property
    def contents(self) -> Mapping[str, Sequence[tuple[str, StoredPiece]]]:
        """The pieces in each file, with their tensors' names."""
        found: dict[str, list[tuple[str, StoredPiece]]] = {name: [] for name in self.files}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                found[piece.file].append((name, piece))
        return found

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Parses a manifest's text; raises ValueError for anything else."""
        if text != signed(text):
            raise ValueError("it is not what was written: its SHA-256 differs")
        match data := parsed(text):
            case {"format": int(number)} if number != FORMAT:
                raise ValueError(f"it has format {number}, and this plait reads format {FORMAT}")
            case {"sha256": _, "format": int(), "id": str(own), "step": step, "files": dict(files),
                  "tensors": dict(tensors), "values": values} if len(data) == 7 and is_size(step):  # fmt: skip
                pass
            case _:
                raise ValueError("it has not the fields format, id, step, files, tensors and values")
        known = {name: _file(name, file) for name, file in files.items()}
        stored = {name: _tensor(name, tensor, known) for name, tensor in tensors.items()}
        read = cls(own, step, known, stored, values)
        for file, pieces in read.contents.items():
            if len({piece.key for _, piece in pieces}) != len(pieces):
                raise ValueError(f"two pieces are the same tensor of the file {file!r}")
        return read


def entries_of(
    file: str, size: int, digest: str, pieces: Iterable[tuple[str, torch.dtype, Sequence[int], Region]]
) -> dict[str, Any]:
    """A manifest's entries for a file whose pieces (name, dtype, whole shape, region) have their numbers as keys."""
    tensors: dict[str, Any] = {}
    for number, (name, dtype, shape, region) in enumerate(pieces):
        kind = {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "pieces": []}
        tensors.setdefault(name, kind)["pieces"].append({"file": file, "key": str(number), "region": region})
    return {"files": {file: {"bytes": size, HASH: digest}}, "tensors": tensors}


def manifest_text(own: str, step: int, parts: Iterable[Mapping[str, Any]], values: Any) -> str:
    """Returns a manifest's text with all files' entries; raises ValueError if they could not be read again."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for part in parts:
        files |= part["files"]
        for name, one in part["tensors"].items():
            known = tensors.setdefault(name, {**one, "pieces": []})
            if (known["dtype"], known["shape"]) != (one["dtype"], one["shape"]):
                raise ValueError(f"the ranks have different dtypes or shapes of {name!r}: {known} and {one}")
            known["pieces"] += one["pieces"]
    fields = {"format": FORMAT, "id": own, "step": step, "files": files, "tensors": tensors, "values": values}
    text = signed(json.dumps({"sha256": "", **fields}, allow_nan=False))
    Manifest.parse(text)
    return text


def signed(text: str) -> str:
    """Returns a manifest's text with the right SHA-256 at its beginning; ValueError if it begins otherwise."""
    _, begin, rest = text.partition(_BEGIN)
    _, quote, rest = rest.partition('"')
    if not text.startswith(_BEGIN) or not quote:
        raise ValueError("it does not begin with its SHA-256")
    return f"{begin}{hashlib.sha256(rest.encode(errors='replace')).hexdigest()}{quote}{rest}"


def _file(name: str, given: Any) -> StoredFile:
    match given:
        case {"bytes": size, **rest} if rest.keys() == {HASH} and FILE.fullmatch(name) and is_size(size):
            if isinstance(digest := rest[HASH], str):
                return StoredFile(size, digest)
    raise ValueError(f"the entry of the file {name[:80]!r} is not a size and a digest of a rank's file")


def _tensor(name: str, given: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    match given:
        case {"dtype": str(dtype), "shape": list(shape), "pieces": list(pieces), **rest} if not rest:
            if dtype in DTYPES and is_shape(shape):
                whole = tuple(shape)
                found = tuple(_piece(name, piece, whole, DTYPES[dtype].itemsize, files) for piece in pieces)
                check_tiling(name, whole, [piece.region for piece in found])
                return StoredTensor(DTYPES[dtype], whole, found)
    raise ValueError(f"the entry of the tensor {name[:80]!r} is not a dtype, a shape and pieces")


def _piece(
    name: str, given: Any, shape: tuple[int, ...], itemsize: int, files: Mapping[str, StoredFile]
) -> StoredPiece:
    match given:
        case {"file": str(file), "key": str(key), "region": list(region), **rest} if not rest and file in files:
            ends = tuple(tuple(pair) if isinstance(pair, list) else () for pair in region)
            right = len(ends) == len(shape) and all(
                len(pair) == 2 and all(map(is_size, pair)) and pair[0] <= pair[1] <= size
                for pair, size in zip(ends, shape, strict=True)
            )
            if right and math.prod(stop - start for start, stop in ends) * itemsize <= files[file].bytes:
                return StoredPiece(file, key, ends)
    raise ValueError(f"a piece of {name[:80]!r} is not a region of its shape in one of the files")


def check_tiling(name: str, shape: tuple[int, ...], regions: Iterable[Region]) -> None:
    """Raises ValueError if regions leave a gap, or overlap.

    They tile the shape if their corners cancel those of the whole, each counted +1 or -1 by its number of upper ends:
    the sum of all boxes minus the whole is then constant, so zero.  The time is linear in the number of corners.
    """
    boxes = [region for region in regions if math.prod(extent(region))]
    whole = tuple((0, size) for size in shape)
    cut = [dim for dim, all_of_it in enumerate(whole) if any(box[dim] != all_of_it for box in boxes)]
    if len(boxes) << len(cut) > MOST_CORNERS:
        raise ValueError(f"{name[:80]!r} has {len(boxes)} pieces, cut along {len(cut)} dims: too many to be held apart")
    corners: Counter[tuple[int, ...]] = Counter()
    for box, sign in [*((box, 1) for box in boxes), *([(whole, -1)] if math.prod(shape) else [])]:
        for upper in product((0, 1), repeat=len(cut)):
            corners[tuple(box[dim][end] for dim, end in zip(cut, upper, strict=True))] += sign * (-1) ** sum(upper)
    if any(corners.values()):
        raise ValueError(f"the pieces of {name[:80]!r} overlap, or leave a gap")


def in_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns the dtype and shape of a tensor in a file."""
    return (REAL[dtype], (*shape, 2)) if dtype in REAL else (dtype, shape)


def parsed(text: str) -> Any:
    """Parses JSON; raises ValueError for a repeated name, NaN, or deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def is_size(value: object) -> bool:
    """True for a number of elements or bytes."""
    return type(value) is int and 0 <= value < MOST


def is_shape(value: object) -> bool:
    """True for a list of sizes whose product is a size."""
    if not isinstance(value, list) or len(value) > DIMS or not all(map(is_size, value)):
        return False
    return math.prod(value) < MOST
