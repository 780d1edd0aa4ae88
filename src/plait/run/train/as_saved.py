"""After a load: the run is compared with the files once more, rank by rank.

    parameters, optimizer state, average, buffers    every piece of this rank, replicas too    ══  its region
    groups, counters, loss scale                     as a save would write them now            ══  the manifest's values

It finds what a load left out, put elsewhere or changed, before a step builds on it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.load import read_together
from plait.checkpoint.snapshot import pieces_of, values_of
from plait.checkpoint.stored import Checkpoint, Stored
from plait.checkpoint.values import InFile
from plait.comm.agree import check_together
from plait.step import EMA, Engine
from plait.table.mesh import AXES


def check_as_saved(path: str | Path, engine: Engine, *, ema: EMA | None = None) -> int:
    """Compares the engine with the checkpoint that it has just loaded; all ranks call it together.

    Returns:
        The number of pieces that this rank has compared.

    Raises:
        RuntimeError: something differs; with its name, on all ranks.
    """
    saved = read_together(path, engine.comm)
    now = values_of(engine, ema, None)
    error: Exception | None = None
    compared = 0
    try:
        for one in pieces_of(engine, ema):
            if one.tensor.numel() and (one.kind or one.first):  # a buffer that was saved is rank 0's
                compared += 1
                if one.name not in saved.tensors:
                    raise RuntimeError(f"{one.name!r} is here, and was not saved")
                if not _same(one.tensor.cpu(), saved.tensors[one.name].read(one.region).to(one.tensor.dtype)):
                    raise RuntimeError(f"{one.name!r} is not what was saved in {str(saved.folder)!r}")
        then = saved.values()
        for key in ("optimizer", "run"):
            if differ := _difference(now[key], then[key], saved, key):
                raise RuntimeError(f"{differ} is not what was saved in {str(saved.folder)!r}")
    except Exception as problem:  # all ranks raise it
        error = problem
    check_together(engine.comm, error, AXES)
    return compared


def _same(mine: Tensor, saved: Tensor) -> bool:
    """True for the same bits, but for those of a NaN."""
    return torch.equal(mine, saved) or bool(((mine == saved) | ((mine != mine) & (saved != saved))).all())


def _difference(now: Any, then: Any, saved: Checkpoint, where: str) -> str:
    """The path of the first difference between two values; empty if there is none."""
    if isinstance(now, dict) and isinstance(then, dict) and now.keys() == then.keys():
        pairs = [(f"{where}/{key}", now[key], then[key]) for key in now]
        return next((found for place, a, b in pairs if (found := _difference(a, b, saved, place))), "")
    if isinstance(now, list | tuple) and type(now) is type(then) and len(now) == len(then):
        rows = enumerate(zip(now, then, strict=True))
        return next((found for i, (a, b) in rows if (found := _difference(a, b, saved, f"{where}/{i}"))), "")
    if isinstance(now, InFile):
        same = isinstance(then, Stored) and saved.tensors.get(now.name) is then
    elif isinstance(now, Tensor):
        there = then.read() if isinstance(then, Stored) else then
        same = isinstance(there, Tensor) and there.dtype == now.dtype and _same(now.cpu(), there)
    else:
        same = type(now) is type(then) and (now == then or (now != now and then != then))
    return "" if same else where
