"""What a checkpoint says of itself: one JSON file, read by one rank, checked field by field before anything is opened.

    {"sha256":  of all that follows,
     "format": 1, "id": "9f3c...", "step": 123,
     "files":   {"rank-00000.safetensors": {"bytes": 4096, "sha256": "..."}, ...},
     "tensors": {"model/blocks.0.weight": {"dtype": "float32", "shape": [4, 8], "pieces":
                     [{"file": "rank-00000.safetensors", "key": "3", "region": [[0, 2], [0, 8]]}, ...]}, ...},
     "values":  all that is no tensor: groups, counters, a user's own (see ``values``)}

Nothing in it is a path: files have names of one form, in the manifest's own folder.  Nothing is allocated by what it
says: sizes are held against those of the files.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from plait.checkpoint.huggingface import NAMES
from plait.core.layout import Region, extent

FORMAT = 1
NAME = "manifest.json"
FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")
LARGEST = 1 << 28
"""Bytes of a manifest."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
_BEGIN = '{"sha256": "'


@dataclass(frozen=True)
class StoredFile:
    """A file's size, and the SHA-256 of its bytes."""

    bytes: int
    sha256: str


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
        files = {name: asdict(file) for name, file in self.files.items()}
        fields = {"format": FORMAT, "id": self.id, "step": self.step, "files": files, "tensors": tensors}
        return signed(json.dumps({"sha256": "", **fields, "values": self.values}, allow_nan=False))

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Raises ValueError for anything that ``text`` does not write."""
        if text != signed(text):
            raise ValueError("it is not what was written: its SHA-256 is another")
        try:
            data = json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_refused)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        match data:
            case {"format": int(number)} if number != FORMAT:
                raise ValueError(f"it has format {number}, and this plait reads format {FORMAT}")
            case {"sha256": _, "format": int(), "id": str(own), "step": step, "files": dict(files),
                  "tensors": dict(tensors), "values": values, **rest} if not rest and _is_size(step):  # fmt: skip
                pass
            case _:
                raise ValueError("it has not the fields format, id, step, files, tensors and values")
        known = {name: _file(name, file) for name, file in files.items()}
        return cls(own, step, known, {name: _tensor(name, tensor, known) for name, tensor in tensors.items()}, values)


def signed(text: str) -> str:
    """A manifest's text with the right SHA-256 in its beginning; ValueError where it begins otherwise."""
    _, begin, rest = text.partition(_BEGIN)
    _, quote, rest = rest.partition('"')
    if not text.startswith(_BEGIN) or not quote:
        raise ValueError("it does not begin with its SHA-256")
    return f"{begin}{hashlib.sha256(rest.encode(errors='replace')).hexdigest()}{quote}{rest}"


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _file(name: str, given: Any) -> StoredFile:
    match given:
        case {"bytes": size, "sha256": str(digest), **rest} if not rest and FILE.fullmatch(name) and _is_size(size):
            return StoredFile(size, digest)
    raise ValueError(f"the entry of the file {name[:80]!r} is not a size and a digest of a rank's file")


def _tensor(name: str, given: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    match given:
        case {"dtype": str(dtype), "shape": list(shape), "pieces": list(pieces), **rest} if not rest:
            whole = tuple(shape)
            if dtype in DTYPES and all(map(_is_size, whole)):
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
                len(pair) == 2 and all(map(_is_size, pair)) and pair[0] <= pair[1] <= size
                for pair, size in zip(ends, shape, strict=True)
            )
            if right and math.prod(stop - start for start, stop in ends) * itemsize <= files[file].bytes:
                return StoredPiece(file, key, ends)
    raise ValueError(f"a piece of {name[:80]!r} is not a region of its shape in one of the files")


def check_tiling(name: str, shape: tuple[int, ...], regions: Iterable[Region]) -> None:
    """Raises ValueError where regions leave a gap, or overlap."""
    boxes = [region for region in regions if math.prod(extent(region))]
    if sum(math.prod(extent(box)) for box in boxes) != math.prod(shape):
        raise ValueError(f"the pieces of {name[:80]!r} are not as many elements as its shape has")
    reached: list[Region] = []  # those that another one may overlap, by their first dim
    for box in sorted(boxes):
        reached = [other for other in reached if not box or other[0][1] > box[0][0]]
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in reached):
            raise ValueError(f"the pieces of {name[:80]!r} overlap")
        reached.append(box)
