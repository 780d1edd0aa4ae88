"""A checkpoint's tensors, read region by region: only the requested bytes.

asked for      w[1:6]              two pieces overlap it: rows 1..3 of the one, rows 0..2 of the other
in files       w[0:4]  w[4:7]
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.folder import OpenFile, find, opened, parse_manifest, read_manifest
from plait.checkpoint.hashing import HASH, Hasher
from plait.checkpoint.manifest import Manifest, in_file
from plait.checkpoint.tensor_file import CHUNK, TensorFile
from plait.checkpoint.values import check_run, decoded
from plait.messages.progress import counted
from plait.table.region import Region, blocks, extent, inside, overlap

BLOCK = 1 << 24
"""The most bytes of a tensor in memory at once, if no rank needs more of it."""

Fill = Callable[[Region, Tensor], None]


@dataclass(frozen=True)
class Stored:
    """A tensor that is read by regions, also as ``stored[slices]``, each slice with a start and a stop."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: Fill
    """Reads a region into memory of its shape, of any dtype, strides and device."""

    @property
    def region(self) -> Region:
        """The region of the whole tensor."""
        return tuple((0, size) for size in self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        return self.read(tuple((one.start, one.stop) for one in slices))

    def read(self, region: Region | None = None) -> Tensor:
        """Reads a region, or the whole, into new memory and in the stored dtype."""
        region = self.region if region is None else region
        self.fill(region, block := torch.empty(extent(region), dtype=self.dtype))
        return block

    def blocks(self, region: Region, most: int = BLOCK) -> Iterator[tuple[Region, Tensor]]:
        """Yields a region in parts of at most ``most`` bytes, in the order of its elements."""
        for block in blocks(region, most // self.dtype.itemsize):
            yield block, self.read(block)

    def equals(self, other: "Stored") -> bool:
        """True for the same shape and numbers; one block of each is in memory at a time."""
        return self.shape == other.shape and all(
            torch.equal(block, other.read(region)) for region, block in self.blocks(self.region)
        )


def assembled(dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[tuple[Region, Fill]]) -> Stored:
    """Returns a tensor made from parts that tile it; each reads in its own coordinates."""
    parts = tuple(parts)

    def fill(region: Region, into: Tensor) -> None:
        for own, read in parts:
            if (common := overlap(region, own)) is not None:
                read(inside(common, own), into[tuple(slice(*ends) for ends in inside(common, region))])

    return Stored(dtype, shape, fill)


@dataclass(frozen=True)
class StoredWeights:
    """Parameters and buffers by name; implements ``zero.state.weights.Weights``."""

    tensors: Mapping[str, Stored]

    def fill(self, name: str, region: Region, into: Tensor) -> None:
        """See ``Stored.fill``."""
        self.tensors[name].fill(region, into)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint; only its manifest has been read."""

    folder: Path
    manifest: Manifest

    @classmethod
    def find(cls, path: str | Path) -> "Checkpoint":
        """Opens the checkpoint that a path names; ValueError if there is none, or its manifest is damaged."""
        folder = find(path)
        return cls(folder, parse_manifest(folder, read_manifest(folder)))

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """The tensors by their names in the manifest."""
        files = {name: TensorFile(self.folder / name) for name in self.manifest.files}
        return {
            name: assembled(one.dtype, one.shape, ((p.region, partial(files[p.file].fill, p.key)) for p in one.pieces))
            for name, one in self.manifest.tensors.items()
        }

    def kind(self, kind: str) -> dict[str, Stored]:
        """The tensors of a kind (model, ema, optimizer/exp_avg, ...) by the rest of their names."""
        prefix = f"{kind}/"
        return {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}

    def values(self, tensors: Mapping[str, Any] | None = None) -> Any:
        """Everything but tensors, as the engine takes it, with each of the ``tensors`` at most once.  Raises ValueError
        for values that no save writes."""
        known = self.tensors if tensors is None else tensors
        left = set(known)

        def tensor(name: str) -> Any:
            if name not in left:
                what, times = ("two values in it are", "once") if name in known else ("a value in it is", "not")
                raise ValueError(f"{what} the tensor {name[:80]!r}, which it has {times}")
            left.remove(name)
            return known[name]

        try:
            check_run(state := decoded(self.manifest.values, tensor), self.manifest.step)
        except ValueError as error:
            raise ValueError(f"{str(self.folder)!r}: {error}") from error
        return state

    def value(self, key: str) -> Any:
        """Returns one of the values, with its tensors read."""
        (given,) = [value for name, value in self.manifest.values["dict"] if name == key][-1:]
        return decoded(given, lambda name: self.tensors[name].read())

    def check_file(self, name: str) -> None:
        """Raises ValueError if a file's bytes are not those written, or its tensors not those of the manifest."""
        path, stored, pieces = self.folder / name, self.manifest.files[name], self.manifest.contents[name]
        try:
            with opened(path) as file:
                if file.size != stored.bytes:
                    raise ValueError(f"{str(path)!r} has {file.size} bytes, and {stored.bytes} were written")
                if digest_of(file) != stored.digest:
                    raise ValueError(f"{str(path)!r} is not what was written: its digest ({HASH}) differs")
        except ValueError as error:
            names = list(dict.fromkeys(tensor for tensor, _ in pieces))
            first = ", ".join(repr(tensor[:80]) for tensor in names[:3]) + (", ..." if names[3:] else "")
            raise ValueError(f"{error}; it has pieces of {len(names)} tensors ({first})") from error
        said = {p.key: in_file(self.manifest.tensors[tensor].dtype, extent(p.region)) for tensor, p in pieces}
        there = {key: (entry.dtype, entry.shape) for key, entry in TensorFile(path).entries.items()}
        if there != said:
            wrong = min(key for key in there.keys() | said.keys() if there.get(key) != said.get(key))
            raise ValueError(
                f"{str(path)!r} has {there.get(wrong)} as tensor {wrong[:80]!r}, its manifest says {said.get(wrong)}"
            )

    def damages(self) -> dict[str, str]:
        """The problem of each damaged file."""
        found = {}
        for name in counted("files read", sorted(self.manifest.files)):
            try:
                self.check_file(name)
            except (ValueError, OSError) as error:
                found[name] = str(error)
        return found

    def check(self) -> None:
        """Raises ValueError if a file is damaged: a copy would get new hashes and look sound."""
        for text in self.damages().values():
            raise ValueError(f"{text}; a damaged checkpoint is neither compared nor converted")


def digest_of(file: OpenFile) -> str:
    """Returns the digest of a file."""
    digest, buffer = Hasher(), memoryview(bytearray(min(CHUNK, file.size)))
    for start in range(0, file.size, CHUNK):
        here = buffer[: file.size - start]
        file.read(start, here)
        digest.update(here)
    return digest.hexdigest()
