"""Text as files of token numbers, mapped into memory and never read whole.

*.npy       one row of uint16, uint32, int32 or int64
*.bin       only the numbers: uint16, or uint32 if the vocabulary has more than 65,536 tokens
a folder    its files of these kinds, by path

shards   [0 .. 4][5 .. 11][12 ..       tokens[3:8] is read from two of them
"""

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from plait.checkpoint.files.reading import shown

KINDS = (".npy", ".bin")
SAMPLED = 1 << 20
"""Number of tokens at each end of a shard that identify its text."""


class Tokens:
    """Shards end to end, as one row.  A slice is also a ``Tokens``, and ``long()`` reads it."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self.shards = [shard for shard in shards if len(shard)]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __getitem__(self, part: slice) -> Self:
        start, stop, _ = part.indices(len(self))
        ends = accumulate(map(len, self.shards), initial=0)
        return type(self)(
            [one[max(start - at, 0) : max(stop - at, 0)] for one, at in zip(self.shards, ends, strict=False)]
        )

    def long(self) -> Tensor:
        """Reads the tokens, int64 [count].  Raises ValueError for a negative number, which marks an ignored target."""
        found = torch.cat([shard.long() for shard in self.shards] or [torch.empty(0, dtype=torch.int64)])
        if len(found) and (least := int(found.min())) < 0:
            raise ValueError(f"the data has token {least}, which is negative: give the tokenizer's numbers, from 0")
        return found

    def sampled(self) -> Iterator[Tensor]:
        """The parts that most likely differ if the text does: the length and the ends of each shard."""
        for shard in self.shards:
            yield torch.tensor([len(shard)])
            yield shard[:SAMPLED].long()
            yield shard[-SAMPLED:].long()


def token_files(path: str | None) -> list[Path]:
    """The files of tokens at a path.  Empty if it is a text."""
    if path is None or not os.path.isdir(path):
        return [Path(path)] if path is not None and path.endswith(KINDS) else []
    files = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return sorted(file for file in files if file.suffix in KINDS and not file.name.startswith("."))


def load_tokens(files: Sequence[Path], vocabulary: int) -> Tokens:
    """Maps the tokens of all files.  ValueError, with the name, for one that is missing or contains something else."""
    return Tokens([_row(file, vocabulary) for file in files])


def _row(file: Path, vocabulary: int) -> Tensor:
    try:
        return _mapped(file, vocabulary)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the tokens in {shown(str(file))}: {' '.join(str(error).split())}") from error


def _mapped(file: Path, vocabulary: int) -> Tensor:
    if not file.stat().st_size:
        raise ValueError("it is empty")
    if file.suffix == ".bin":
        return torch.from_numpy(np.memmap(file, "<u2" if vocabulary <= 1 << 16 else "<u4", "c"))
    row = torch.from_numpy(np.load(file, mmap_mode="c", allow_pickle=False))
    if row.dim() != 1 or row.dtype.is_floating_point or row.dtype.is_complex or row.dtype == torch.bool:
        kind = str(row.dtype).removeprefix("torch.")
        raise ValueError(f"it has {kind} {list(row.shape)}: give one row of whole numbers")
    return row
