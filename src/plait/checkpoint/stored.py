"""What lies in a checkpoint's files, read region by region: only the bytes that are asked for.

asked for      w[1:6]              two pieces overlap it: rows 1..3 of the one, rows 0..2 of the other
in files       w[0:4]  w[4:7]
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.checkpoint.folder import check_file
from plait.checkpoint.manifest import Manifest, StoredTensor
from plait.checkpoint.storage import Storage
from plait.checkpoint.tensor_file import TensorFile, in_file
from plait.table.layout import Region, blocks, extent, inside, overlap

BLOCK = 1 << 24
"""Bytes of a tensor in memory at once, where no rank needs more of it."""


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, read by ``saved[slices]``, each slice with a start and a stop."""

    files: Mapping[str, TensorFile]
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """In which it was saved."""
        return self.stored.dtype

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        return self.read(tuple((one.start, one.stop) for one in slices))

    def read(self, region: Region) -> Tensor:
        """A block, in memory of its own, in the dtype in which it was saved."""
        self.fill(region, block := torch.empty(extent(region), dtype=self.stored.dtype))
        return block

    def fill(self, region: Region, into: Tensor) -> None:
        """A block, into memory of its extent."""
        for piece in self.stored.pieces:
            if (common := overlap(region, piece.region)) is not None:
                here = into[tuple(slice(*ends) for ends in inside(common, region))]
                with self.files[piece.file].opened() as file:
                    file.read(piece.key, inside(common, piece.region), here)

    def whole(self) -> Tensor:
        """All of it."""
        return self.read(tuple((0, size) for size in self.shape))


def saved_tensors(folder: Storage, manifest: Manifest) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint, by name; nothing is opened yet."""
    files = {name: TensorFile(folder / name) for name in manifest.files}
    return {name: SavedTensor(files, stored) for name, stored in manifest.tensors.items()}


@dataclass(frozen=True)
class SavedWeights:
    """The parameters and buffers of a checkpoint; an ``engine.state.weights.Weights``."""

    tensors: Mapping[str, SavedTensor]

    def fill(self, name: str, region: Region, into: Tensor) -> None:
        """See ``SavedTensor.fill``."""
        self.tensors[name].fill(region, into)


def is_same(one: SavedTensor, other: SavedTensor) -> bool:
    """Whether two tensors have the same shape and numbers; a part of each is in memory at a time."""
    if one.shape != other.shape:
        return False
    parts = blocks(tuple((0, size) for size in one.shape), BLOCK // one.stored.dtype.itemsize)
    return all(torch.equal(one.read(part), other.read(part)) for part in parts)


def check_contents(folder: Storage, name: str, manifest: Manifest, threads: int = 1) -> None:
    """Raises ValueError where a file is not the one that was written, or has not the tensors that its manifest says.

    Args:
        threads: so many read it.
    """
    pieces = manifest.contents[name]
    try:
        check_file(folder / name, manifest.files[name], threads)
    except ValueError as error:
        names = list(dict.fromkeys(tensor for tensor, _ in pieces))
        first = ", ".join(repr(tensor[:80]) for tensor in names[:3])
        more = ", ..." if names[3:] else ""
        raise ValueError(f"{error}; it has pieces of {len(names)} tensors ({first}{more})") from error
    told = {piece.key: in_file(manifest.tensors[tensor].dtype, extent(piece.region)) for tensor, piece in pieces}
    there = {key: (entry.dtype, entry.shape) for key, entry in TensorFile(folder / name).entries.items()}
    if there != told:
        wrong = sorted(key for key in there.keys() | told.keys() if there.get(key) != told.get(key))
        raise ValueError(
            f"{str(folder / name)!r} has {there.get(wrong[0])} as tensor {wrong[0][:80]!r}, and its manifest says "
            f"{told.get(wrong[0])}"
        )
