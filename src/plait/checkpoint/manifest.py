"""What a checkpoint says of itself: one JSON file, read by one rank, checked field by field before anything is opened.

    {"sha256":  of all that follows,
     "format": 4, "id": "9f3c...", "step": 123,
     "files":   {"rank-00000.safetensors": {"bytes": 4096, "blake3 of 16 MiB parts": "..."}, ...},
     "tensors": {"model/blocks.0.weight": {"dtype": "float32", "shape": [4, 8], "pieces":
                     [{"file": "rank-00000.safetensors", "key": "3", "region": [[0, 2], [0, 8]]}, ...]}, ...},
     "values":  all that is no tensor: groups, counters, a user's own (see ``values``)}

Nothing in it is a path: files have names of one form, in the manifest's own folder.  Nothing is allocated by what it
says: sizes are held against those of the files.  Earlier formats hashed files in other ways (see ``hashing``), and
did not name the classes of optimizers; they are read as this one.
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

from plait.checkpoint.hashing import HASHES, TODAY
from plait.checkpoint.tensor_file import SAVABLE, is_shape, is_size, parsed
from plait.table.layout import Region, extent

FORMAT, READ_TOO = 4, (1, 2, 3)
NAME = "manifest.json"
FILE = re.compile(r"rank-[0-9]{5,9}(\.[0-9a-f]{1,32})?\.safetensors")
LARGEST = 1 << 28
"""Bytes of a manifest."""
MOST_CORNERS = 1 << 24
"""Of the pieces of one tensor, over the dims along which they are cut."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAVABLE}
_BEGIN = '{"sha256": "'


@dataclass(frozen=True)
class StoredFile:
    """A file's size, and the hash of its bytes."""

    bytes: int
    digest: str
    hash: str = TODAY
    """Of ``hashing.HASHES``."""


@dataclass(frozen=True)
class StoredPiece:
    """A region of a whole tensor: where its values lie."""

    file: str
    key: str
    region: Region


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, and the regions in which it was saved, which do not overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's own description."""

    id: str
    step: int
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    values: Any
    format: int = FORMAT
    """In which it was read; it is written in the newest."""

    @cached_property
    def contents(self) -> Mapping[str, Sequence[tuple[str, StoredPiece]]]:
        """For each file the pieces in it, with the names of the whole tensors."""
        found: dict[str, list[tuple[str, StoredPiece]]] = {name: [] for name in self.files}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                found[piece.file].append((name, piece))
        return found

    def text(self) -> str:
        """As JSON; floats keep every bit."""
        tensors = {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": tensor.shape,
                "pieces": [vars(p) for p in tensor.pieces],
            }
            for name, tensor in self.tensors.items()
        }
        files = {name: {"bytes": file.bytes, file.hash: file.digest} for name, file in self.files.items()}
        fields = {"format": FORMAT, "id": self.id, "step": self.step, "files": files, "tensors": tensors}
        return signed(json.dumps({"sha256": "", **fields, "values": self.values}, allow_nan=False))

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Raises ValueError for anything that ``text`` does not write."""
        if text != signed(text):
            raise ValueError("it is not what was written: its SHA-256 is another")
        data = parsed(text)
        match data:
            case {"format": int(number)} if number not in (FORMAT, *READ_TOO):
                raise ValueError(f"it has format {number}, and this plait reads formats up to {FORMAT}")
            case {"sha256": _, "format": int(number), "id": str(own), "step": step, "files": dict(files),
                  "tensors": dict(tensors), "values": values, **rest} if not rest and is_size(step):  # fmt: skip
                pass
            case _:
                raise ValueError("it has not the fields format, id, step, files, tensors and values")
        known = {name: _file(name, file) for name, file in files.items()}
        match values:
            case {"dict": list(items)} if number < 4:
                values = {"dict": [*items, ["optimizer_classes", None]]}
        stored = {name: _tensor(name, tensor, known) for name, tensor in tensors.items()}
        read = cls(own, step, known, stored, values, number)
        for file, pieces in read.contents.items():
            if len({piece.key for _, piece in pieces}) != len(pieces):
                raise ValueError(f"two pieces are the same tensor of the file {file!r}")
        return read


def signed(text: str) -> str:
    """A manifest's text with the right SHA-256 in its beginning; ValueError where it begins otherwise."""
    _, begin, rest = text.partition(_BEGIN)
    _, quote, rest = rest.partition('"')
    if not text.startswith(_BEGIN) or not quote:
        raise ValueError("it does not begin with its SHA-256")
    return f"{begin}{hashlib.sha256(rest.encode(errors='replace')).hexdigest()}{quote}{rest}"


def _file(name: str, given: Any) -> StoredFile:
    match given:
        case {"bytes": size, **rest} if len(rest) == 1 and FILE.fullmatch(name) and is_size(size):
            ((kind, digest),) = rest.items()
            if kind in HASHES and isinstance(digest, str):
                return StoredFile(size, digest, str(kind))
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
    """Raises ValueError where regions leave a gap, or overlap.

    They do neither where their corners cancel, each counted +1 or -1 by how many of its ends are upper ones, but for
    those of the whole: the sum of all boxes less the whole is then constant, so zero.  It takes the time of one look at
    each corner, whatever a manifest says.
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
