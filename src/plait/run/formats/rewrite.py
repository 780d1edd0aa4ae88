"""A checkpoint from any tensors that can be read by regions; one block of a tensor is in memory at a time."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.manifest import entries_of, manifest_text
from plait.checkpoint.places import Storage, place, step_name
from plait.checkpoint.stored import Stored
from plait.checkpoint.tensor_file import write_tensor_file
from plait.messages.progress import counted


def write_checkpoint(out: str | Path, step: int, values: Any, tensors: Mapping[str, Stored]) -> Storage:
    """Writes a checkpoint of these tensors and encoded values, in one file; returns it.

    Raises:
        ValueError: ``out`` has one of this step.
    """
    own = secrets.token_hex(8)
    partial = place(out).partial(step_name(step), own)
    partial.begin()
    progress = counted("tensors written", list(tensors))

    def blocks(one: Stored) -> Iterator[Tensor]:
        next(progress)
        for _, block in one.blocks(one.region):
            yield block

    try:
        file = partial.file(0, "safetensors")
        size, digest = write_tensor_file(file, [(one.shape, one.dtype, blocks(one)) for one in tensors.values()])
        rows = [(name, one.dtype, one.shape, one.region) for name, one in tensors.items()]
        entries = entries_of(file.name, size, digest, rows)
        return partial.publish(manifest_text(own, step, [entries], values), list(entries["files"]))
    except BaseException:
        with suppress(OSError):
            partial.discard()
        raise
