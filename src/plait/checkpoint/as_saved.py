"""After a load: everything is exactly what lies in the checkpoint, read once more and compared, rank by rank.

    engine.pieces(), buffers, average    every piece that this rank has, replicas too    ══  its region in the files
    groups, counters, loss scale         as a save would write them now                  ══  the manifest's values

It finds what a load left out, put elsewhere or changed on its way, before the first step that would build on it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.load import read_together
from plait.checkpoint.snapshot import numbers_of
from plait.checkpoint.stored import SavedTensor, saved_tensors
from plait.checkpoint.values import encoded
from plait.comm.agree import check_together
from plait.step import EMA, Engine
from plait.table.mesh import AXES


def check_as_saved(path: str | Path, engine: Engine, *, ema: EMA | None = None) -> int:
    """Compare the engine with the checkpoint that it has just loaded; all ranks call it together.

    Returns:
        How many pieces this rank has compared.

    Raises:
        RuntimeError: something is not as it was saved: what, and on which rank.
    """
    folder, manifest = read_together(path, engine.comm)
    tensors = saved_tensors(folder, manifest)
    error: Exception | None = None
    compared = 0
    values: dict[str, Tensor] = {}
    now = {"optimizer": encoded(numbers_of(engine), values), "run": encoded(engine.step_state(), values)}
    try:
        for name, mine, saved in _pairs(engine, ema, tensors):
            compared += 1
            if not _same(mine.cpu(), saved.to(mine.dtype)):
                raise RuntimeError(f"{name!r} is not what was saved in {str(folder)!r}")
        then = {key: item for key, item in _items(manifest.values) if key in now}
        for key, value in now.items():
            if differ := _first_difference(value, then.get(key), values, tensors):
                raise RuntimeError(f"{key}{differ} is not what was saved in {str(folder)!r}")
    except Exception as problem:  # whatever it is, the others hear of it
        error = problem
    check_together(engine.comm, error, AXES)
    return compared


def _pairs(engine: Engine, ema: EMA | None, tensors: dict[str, SavedTensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What this rank has, and the same of the files."""
    aliases = engine.directory.aliases
    for kind, pieces in (("model", engine.pieces()), ("ema", () if ema is None else ema.pieces())):
        for piece in pieces:
            prefix = f"optimizer/{piece.key}" if piece.key else kind
            name = f"{prefix}/{aliases.get(piece.name, piece.name)}"
            if piece.tensor.numel():
                yield name, piece.tensor, _saved(name, tensors).read(piece.region)
    for key, buffer in engine.own_buffers().items():
        yield f"model/{key}", buffer, _saved(f"model/{key}", tensors).whole()


def _same(mine: Tensor, saved: Tensor) -> bool:
    """To the bit, but for the bits of a NaN."""
    return torch.equal(mine, saved) or bool(((mine == saved) | ((mine != mine) & (saved != saved))).all())


def _saved(name: str, tensors: dict[str, SavedTensor]) -> SavedTensor:
    if name not in tensors:
        raise RuntimeError(f"{name!r} is here, and was not saved")
    return tensors[name]


def _items(values: Any) -> list[Any]:
    """Of a dict among a manifest's values."""
    return values["dict"] if isinstance(values, dict) and isinstance(values.get("dict"), list) else []


def _first_difference(
    now: Any, then: Any, values: dict[str, Tensor], tensors: dict[str, SavedTensor], where: str = ""
) -> str:
    """Where two values, as JSON, are not the same; empty where they are.  Tensors are compared by what they hold."""
    if isinstance(now, dict) and isinstance(then, dict) and now.keys() == then.keys() == {"tensor"}:
        if now["tensor"] not in values:
            return "" if now == then else where or "/"
        same = _same(values[now["tensor"]].cpu(), _saved(then["tensor"], tensors).whole())
        return "" if same else where or "/"
    if isinstance(now, dict) and isinstance(then, dict) and now.keys() == then.keys():
        pairs = [(f"{where}/{key}", now[key], then[key]) for key in now]
    elif isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        pairs = [(f"{where}/{number}", a, b) for number, (a, b) in enumerate(zip(now, then, strict=True))]
    else:
        return "" if type(now) is type(then) and now == then else where or "/"
    return next((found for place, a, b in pairs if (found := _first_difference(a, b, values, tensors, place))), "")
