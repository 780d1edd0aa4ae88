"""What lies in a checkpoint's files, read region by region: only the bytes that are asked for.

asked for      w[1:6]              two pieces overlap it: rows 1..3 of the one, rows 0..2 of the other
in files       w[0:4]  w[4:7]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.checkpoint.folder import check_file
from plait.checkpoint.huggingface import NAMES
from plait.checkpoint.manifest import Manifest, StoredTensor
from plait.core.layout import Region, blocks, extent

BLOCK = 1 << 24
"""Bytes of a tensor in memory at once, where no rank needs more of it."""


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, read by ``saved[slices]``, each slice with a start and a stop."""

    folder: Path
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        return self.read(tuple((one.start, one.stop) for one in slices))

    def read(self, region: Region) -> Tensor:
        """A block, in memory of its own, in the dtype in which it was saved."""
        block = torch.empty(extent(region), dtype=self.stored.dtype)
        for piece in self.stored.pieces:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, piece.region, strict=True))
            if any(start >= stop for start, stop in common):
                continue
            with safe_open(self.folder / piece.file, "pt") as file:
                read = (
                    file.get_slice(piece.key)[_slices(common, piece.region)] if common else file.get_tensor(piece.key)
                )
            block[_slices(common, region)] = read
        return block

    def whole(self) -> Tensor:
        """All of it."""
        return self.read(tuple((0, size) for size in self.shape))


def _slices(region: Region, inside: Region) -> tuple[slice, ...]:
    """A region as slices of another one that has it."""
    return tuple(slice(a - origin, b - origin) for (a, b), (origin, _) in zip(region, inside, strict=True))


@dataclass(frozen=True)
class SavedWeights:
    """The parameters and buffers of a checkpoint; an ``engine.state.weights.Weights``."""

    tensors: Mapping[str, SavedTensor]

    def read(self, name: str, region: Region) -> Tensor:
        """See ``SavedTensor.read``."""
        return self.tensors[name].read(region)


def is_same(one: SavedTensor, other: SavedTensor) -> bool:
    """Whether two tensors have the same shape and numbers; a part of each is in memory at a time."""
    if one.shape != other.shape:
        return False
    parts = blocks(tuple((0, size) for size in one.shape), BLOCK // one.stored.dtype.itemsize)
    return all(torch.equal(one.read(part), other.read(part)) for part in parts)


def check_contents(folder: Path, name: str, manifest: Manifest) -> None:
    """Raises ValueError where a file is not the one that was written, or has not the tensors that its manifest says."""
    check_file(folder / name, manifest.files[name])
    told: dict[str, Any] = {}
    for stored in manifest.tensors.values():
        for piece in stored.pieces:
            if piece.file == name:
                told[piece.key] = NAMES[stored.dtype], extent(piece.region)
    try:
        with safe_open(folder / name, "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            there = {key: (block.get_dtype(), tuple(block.get_shape())) for key, block in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{str(folder / name)!r} is no safetensors file: {error}") from error
    if there != told:
        wrong = sorted(key for key in there.keys() | told.keys() if there.get(key) != told.get(key))
        raise ValueError(
            f"{str(folder / name)!r} has {there.get(wrong[0])} as tensor {wrong[0][:80]!r}, and its manifest says "
            f"{told.get(wrong[0])}"
        )
