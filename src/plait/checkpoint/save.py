"""``plait.save``: every rank writes the pieces that no rank before it has; nothing is gathered.

    each rank   pieces ──► rank-00002.safetensors, hashed as it is written, flushed      regions, sizes, digests
    rank 0                                                                    ──► manifest ──► renamed ──► latest

    model/blocks.0.weight                regions in the optimizer's precision; buffers from the first rank that has them
    optimizer/exp_avg/blocks.0.weight    what an optimizer keeps for each element
    ema/blocks.0.weight                  an average of the weights
    value/3                              any other tensor: rank 0's

What one rank cannot do (a full disk, a weight that is not finite) no rank has done: all raise, and the checkpoint
before stays the newest.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.folder import begin, publish, step_name
from plait.checkpoint.huggingface import NAMES, safetensors_header
from plait.checkpoint.manifest import DTYPES, Manifest, StoredFile, StoredPiece, StoredTensor
from plait.checkpoint.values import InFile, encoded
from plait.comm.agree import broadcast_text, check_together, gather_bytes
from plait.core.collectives import Note
from plait.core.layout import Region
from plait.core.mesh import AXES
from plait.engine import EMA, Engine


@dataclass(frozen=True)
class Written:
    """A tensor in a rank's file: a region of a whole one."""

    name: str
    shape: tuple[int, ...]
    region: Region
    tensor: Tensor
    weight: bool = False
    """It must be finite."""


def save(path: str | Path, engine: Engine, *, ema: EMA | None = None, extra: Any = None) -> Path:
    """Save a run between two steps, so that any layout can go on with it; all ranks call it together.

    It has parameters, buffers, the optimizers' state and groups, the number of steps made, the loss scale, and an
    average of the weights.  The checkpoint is ``path/step-000123``; one that is there is never overwritten.

    Args:
        path: a folder for the checkpoints of one run, which all ranks see.
        extra: what else goes on, of rank 0: numbers, strings, tensors, and lists, tuples and dicts of them (a
            scheduler's ``state_dict()``, an epoch).

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: in a step; the checkpoint exists, a weight is not finite, ``extra`` is of another type.
        OSError: a file or folder that this rank could not write.
        RuntimeError: what another rank raises.
    """
    engine.check_between_steps("plait.save")
    comm, parent = engine.comm, Path(path)
    error: OSError | ValueError | None = None
    values: dict[str, Tensor] = {}
    state: Any = None
    partial = parent
    numbers = numbers_of(engine)
    try:
        if not comm.rank:
            own = {
                "optimizer": numbers,
                "run": engine.step_state(),
                "ema": None if ema is None else ema.decay,
                "extra": extra,
            }
            state = encoded(own, values)
        written = list(_written(engine, ema, values))
        _check_savable(written)
        if not comm.rank:
            partial = begin(parent, engine.steps, secrets.token_hex(8))
    except (OSError, ValueError) as problem:
        error = problem
    check_together(comm, error, AXES)
    partial = parent / broadcast_text(comm, partial.name, Note("state"))
    try:
        _write_together(engine, partial, written, state)
    finally:
        if not comm.rank:
            shutil.rmtree(partial, ignore_errors=True)  # it is there only where something has failed
    return parent / step_name(engine.steps)


def numbers_of(engine: Engine) -> Any:
    """The optimizers' state, with names in the place of what is saved piece by piece; None without optimizers."""
    if not engine.optimizers:
        return None
    state = engine.optimizer_state_dict(elements=False)
    named = {
        name: {
            key: InFile(f"optimizer/{key}/{name}") if isinstance(value, Tensor) and value.is_meta else value
            for key, value in own.items()
        }
        for name, own in state["state"].items()
    }
    return {**state, "state": named}


def _written(engine: Engine, ema: EMA | None, values: Mapping[str, Tensor]) -> Iterator[Written]:
    """What this rank writes."""
    shapes, aliases = engine.directory.shapes, engine.directory.aliases
    for kind, pieces in (("model", engine.pieces()), ("ema", () if ema is None else ema.pieces())):
        for piece in pieces:
            name = aliases.get(piece.name, piece.name)
            if piece.first:
                prefix = f"optimizer/{piece.key}" if piece.key else kind
                yield Written(f"{prefix}/{name}", shapes[name][0], piece.region, piece.tensor, not piece.key)
    whole = {**{f"model/{name}": buffer for name, buffer in engine.own_buffers().items()}, **values}
    for name, tensor in whole.items():
        shape = tuple(tensor.shape)
        yield Written(name, shape, tuple((0, size) for size in shape), tensor.detach())


def _check_savable(written: Sequence[Written]) -> None:
    for one in written:
        if one.tensor.dtype not in NAMES:
            raise ValueError(f"{one.name!r} is of {one.tensor.dtype}, which cannot be saved")
        if one.weight and not one.tensor.isfinite().all():
            raise ValueError(
                f"{one.name!r} has values that are not finite in its region {one.region}: nothing is saved, and the "
                f"checkpoint before stays the newest"
            )


def _write_together(engine: Engine, partial: Path, written: Sequence[Written], state: Any) -> None:
    """Write this rank's file; rank 0 adds the manifest of all."""
    comm, stored = engine.comm, None
    error: OSError | ValueError | None = None
    file = partial / f"rank-{comm.rank:05d}.safetensors"
    tensors = [one.tensor for one in written]
    try:
        stored = write_tensors(file, tensors)
    except OSError as problem:
        error = problem
        problem.strerror = f"{problem.strerror} ({sum(t.nbytes for t in tensors)} bytes to write)"
        problem.filename = str(file)
    check_together(comm, error, AXES)
    assert stored is not None
    mine = [[one.name, one.shape, str(one.tensor.dtype).removeprefix("torch."), one.region] for one in written]
    told = gather_bytes(comm, json.dumps([stored.bytes, stored.sha256, mine]).encode())
    if told is not None:
        try:
            publish(partial, _manifest(engine, partial, [json.loads(row) for row in told], state))
        except (OSError, ValueError) as problem:
            error = problem
    check_together(comm, error, AXES)


def write_tensors(path: Path, tensors: Sequence[Tensor]) -> StoredFile:
    """A safetensors file of tensors that are called by their number; on the disk when it returns."""
    shapes = {str(i): (tuple(tensor.shape), tensor.dtype) for i, tensor in enumerate(tensors)}
    header, starts, end = safetensors_header(shapes, {str(i): tensor.nbytes for i, tensor in enumerate(tensors)})
    digest = hashlib.sha256(header)
    with path.open("xb") as file:
        file.write(header)
        for key in sorted(starts, key=lambda key: (starts[key], tensors[int(key)].nbytes)):
            data = tensors[int(key)].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(end, digest.hexdigest())


def _manifest(engine: Engine, partial: Path, told: Sequence[Any], state: Any) -> Manifest:
    """Of all that the ranks have written."""
    files: dict[str, StoredFile] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    for rank, (size, digest, rows) in enumerate(told):
        file = f"rank-{rank:05d}.safetensors"
        files[file] = StoredFile(size, digest)
        for number, (name, shape, dtype, region) in enumerate(rows):
            kind = DTYPES[dtype], tuple(shape)
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"the ranks have different dtypes or shapes of {name!r}: {kinds[name]} and {kind}")
            place = tuple((start, stop) for start, stop in region)
            pieces.setdefault(name, []).append(StoredPiece(file, str(number), place))
    tensors = {name: StoredTensor(*kind, tuple(pieces[name])) for name, kind in kinds.items()}
    return Manifest(partial.name.split(".")[2], engine.steps, files, tensors, state)
