"""A checkpoint without an engine: opened, read block by block, and written anew in other files.

opened     Saved: folder, manifest, its tensors, its values
written    from any tensors that can be read by regions; never more than a block of one is in memory

tensors, end to end    |  w (rows 0..6)  |  b  | v (rows 0..2)  |
two files              |  w[0:5]         || w[5:7]  b  v        |     cut between rows, at half of the bytes
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.folder import begin, find, place, publish, read_manifest
from plait.checkpoint.hashing import Hasher, threads_for
from plait.checkpoint.manifest import Manifest, StoredFile, StoredPiece, StoredTensor
from plait.checkpoint.storage import Storage
from plait.checkpoint.stored import BLOCK, check_contents, saved_tensors
from plait.checkpoint.tensor_file import safetensors_header
from plait.checkpoint.values import state_of
from plait.messages.progress import counted
from plait.table.layout import Region, blocks, extent


@dataclass(frozen=True)
class Whole:
    """A tensor that can be read region by region, each in memory of its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Region], Tensor]

    @property
    def region(self) -> Region:
        """All of it."""
        return tuple((0, size) for size in self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, region: Region, most: int = BLOCK) -> Iterator[tuple[Region, Tensor]]:
        """A region in parts of at most this many bytes, in the order of its elements."""
        for block in blocks(region, most // self.dtype.itemsize):
            yield block, self.read(block)


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    folder: Storage
    manifest: Manifest

    @classmethod
    def find(cls, path: str | Path | Storage) -> "Saved":
        """The checkpoint that a path means; ValueError where there is none, or no manifest that can be read."""
        folder = find(path)
        return cls(folder, read_manifest(folder))

    @property
    def tensors(self) -> dict[str, Whole]:
        """By their names in the manifest."""
        found = saved_tensors(self.folder, self.manifest)
        return {name: Whole(saved.stored.dtype, saved.shape, saved.read) for name, saved in found.items()}

    def kind(self, kind: str) -> dict[str, Whole]:
        """The tensors of a kind (model, ema, optimizer/exp_avg, ...), by the rest of their names."""
        own = {name: tensor for name, tensor in self.tensors.items() if name.startswith(f"{kind}/")}
        return {name.removeprefix(f"{kind}/"): tensor for name, tensor in own.items()}

    def values(self, tensors: Mapping[str, Any]) -> Any:
        """All that is no tensor, with ``tensors`` where they stand; ValueError for what no save writes."""
        try:
            return state_of(self.manifest, tensors)
        except ValueError as error:
            raise ValueError(f"{str(self.folder)!r}: {error}") from error

    def damages(self) -> dict[str, str]:
        """What is wrong with each file that is not whole."""
        found = {}
        for name in counted("files read", sorted(self.manifest.files)):
            try:
                check_contents(self.folder, name, self.manifest, threads_for(1))
            except (ValueError, OSError) as error:
                found[name] = str(error)
        return found

    def check(self) -> None:
        """Raises ValueError where a file is damaged: what would be made of it would look whole."""
        for text in self.damages().values():
            raise ValueError(f"{text}; a damaged checkpoint is neither compared nor written anew")


def reshard(saved: Saved, out: str | Path, ranks: int) -> Storage:
    """Write a checkpoint in as many files as so many ranks would; the new one in ``out`` is returned.

    Raises:
        ValueError: it is damaged, or there is one of its step in ``out``.
    """
    saved.check()
    return write_checkpoint(out, saved.manifest, saved.tensors, ranks)


def write_checkpoint(out: str | Path, like: Manifest, tensors: Mapping[str, Whole], ranks: int) -> Storage:
    """Write a checkpoint that has these tensors, and all else as in ``like``; the one in ``out`` is returned.

    Raises:
        ValueError: there is one of its step already.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks write no file: give 1 or more")
    own = secrets.token_hex(8)
    partial = begin(place(out), like.step, own)
    try:
        files: dict[str, StoredFile] = {}
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in tensors}
        for rank, share in enumerate(_shares(tensors, ranks)):
            target = partial.file(rank, "safetensors")
            file = target.name
            files[file] = _write(target, [(tensors[name], region) for name, region in share])
            for number, (name, region) in enumerate(share):
                pieces[name].append(StoredPiece(file, str(number), region))
        stored = {name: StoredTensor(one.dtype, one.shape, tuple(pieces[name])) for name, one in tensors.items()}
        return publish(partial, replace(like, id=own, files=files, tensors=stored))
    except BaseException:
        with suppress(OSError):
            partial.discard()
        raise


def _shares(tensors: Mapping[str, Whole], ranks: int) -> list[list[tuple[str, Region]]]:
    """What each rank writes: tensors end to end, cut between rows into parts of about as many bytes."""
    shares: list[list[tuple[str, Region]]] = [[] for _ in range(ranks)]
    window = max(1, -(-sum(one.nbytes for one in tensors.values()) // ranks))
    begin = 0
    for name, one in tensors.items():
        if not one.nbytes:
            continue
        rows, rest = (one.shape[0], one.region[1:]) if one.shape else (1, ())
        row = one.nbytes // rows
        first = 0
        while first < rows:  # a row belongs to the rank in whose window it begins
            rank = (begin + first * row) // window
            last = min(rows, -(-((rank + 1) * window - begin) // row))
            shares[rank].append((name, ((first, last), *rest) if one.shape else ()))
            first = last
        begin += one.nbytes
    return shares


def _write(path: Storage, regions: Sequence[tuple[Whole, Region]]) -> StoredFile:
    """A safetensors file of regions, which are called by their number; on the disk when it returns."""
    shapes = {str(i): (extent(region), one.dtype) for i, (one, region) in enumerate(regions)}
    sizes = {key: math.prod(shape) * dtype.itemsize for key, (shape, dtype) in shapes.items()}
    header, starts, end = safetensors_header(shapes, sizes)
    digest = Hasher()
    digest.update(header)
    with path.created() as file:
        file.write(header)
        for key in counted(f"pieces of {path.name}", sorted(starts, key=starts.__getitem__)):
            one, region = regions[int(key)]
            for _, block in one.blocks(region):
                data = block.contiguous().reshape(-1).view(torch.uint8).numpy().data
                file.write(data)
                digest.update(data)
    return StoredFile(end, digest.hexdigest())
