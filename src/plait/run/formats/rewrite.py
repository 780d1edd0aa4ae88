"""A checkpoint from any tensors that can be read by regions; one block of a tensor is in memory at a time.

tensors, end to end    |  w (rows 0..6)  |  b  | v (rows 0..2)  |
two files              |  w[0:5]         || w[5:7]  b  v        |     cut between rows, at half of the bytes
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.manifest import entries_of, manifest_text
from plait.checkpoint.places import Storage, place, step_name
from plait.checkpoint.stored import Checkpoint, Stored
from plait.checkpoint.tensor_file import write_tensor_file
from plait.messages.progress import counted
from plait.table.layout import Region, extent


def reshard(saved: Checkpoint, out: str | Path, ranks: int) -> Storage:
    """Writes a checkpoint in ``ranks`` files; returns the new one in ``out``.

    Raises:
        ValueError: it is damaged, or ``out`` has one of its step.
    """
    saved.check()
    return write_checkpoint(out, saved.manifest.step, saved.manifest.values, saved.tensors, ranks)


def write_checkpoint(out: str | Path, step: int, values: Any, tensors: Mapping[str, Stored], ranks: int) -> Storage:
    """Writes a checkpoint of these tensors and encoded values in ``ranks`` files; returns it.

    Raises:
        ValueError: ``out`` has one of this step.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks write no file: give 1 or more")
    own = secrets.token_hex(8)
    partial = place(out).partial(step_name(step), own)
    partial.begin()
    shares = _shares(tensors, ranks)
    progress = counted("pieces written", range(sum(map(len, shares))))

    def blocks(name: str, region: Region) -> Iterator[Tensor]:
        next(progress)
        for _, block in tensors[name].blocks(region):
            yield block

    try:
        parts = []
        for rank, share in enumerate(shares):
            file = partial.file(rank, "safetensors")
            pieces = [(extent(region), tensors[name].dtype, blocks(name, region)) for name, region in share]
            size, digest = write_tensor_file(file, pieces)
            rows = [(name, tensors[name].dtype, tensors[name].shape, region) for name, region in share]
            parts.append(entries_of(file.name, size, digest, rows))
        return partial.publish(
            manifest_text(own, step, parts, values), [name for part in parts for name in part["files"]]
        )
    except BaseException:
        with suppress(OSError):
            partial.discard()
        raise


def _shares(tensors: Mapping[str, Stored], ranks: int) -> list[list[tuple[str, Region]]]:
    """The regions of each rank: tensors end to end, cut between rows into parts of about as many bytes."""
    shares: list[list[tuple[str, Region]]] = [[] for _ in range(ranks)]
    window = max(1, -(-sum(one.nbytes for one in tensors.values()) // ranks))
    begin = 0
    for name, one in tensors.items():
        if not one.nbytes:
            shares[0].append((name, one.region))
            continue
        rows, rest = (one.shape[0], one.region[1:]) if one.shape else (1, ())
        row = one.nbytes // rows
        first = 0
        while first < rows:  # a row goes to the rank in whose window it begins
            rank = (begin + first * row) // window
            last = min(rows, -(-((rank + 1) * window - begin) // row))
            shares[rank].append((name, ((first, last), *rest) if one.shape else ()))
            first = last
        begin += one.nbytes
    return shares
