"""``plait.load``: loads a checkpoint into any layout; each rank reads only its own regions.

rank 0      finds the checkpoint, reads the manifest                      its text goes to all
each rank   file i, where i = rank modulo ranks: size, hash, header    all raise any error
            names, shapes, groups, seed against the engine             before anything is changed
            its own regions of weights, buffers, optimizer state, average
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint.fits import check_fits, weights_of
from plait.checkpoint.folder import checkpoints, find, folder_at, parse_manifest, read_manifest
from plait.checkpoint.stored import Checkpoint, StoredWeights
from plait.comm import Comm
from plait.comm.texts import broadcast_bytes, check_together
from plait.messages.escape import one_line
from plait.step import EMA, Engine
from plait.table.collectives import Note
from plait.table.mesh import AXES

LONGEST = 1900
"""The most characters of an error."""


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that was loaded."""

    path: Path
    """Its folder."""
    step: int
    """The number of steps made when it was saved."""
    extra: Any
    """The ``extra`` of ``plait.save``, on every rank."""


def load(path: str | Path, engine: Engine, *, ema: EMA | None = None) -> Loaded:
    """Continues a run that ``plait.save`` saved, under any layout; all ranks call it together.

    Every file is verified first.  The model needs the saved names and shapes, the engine the saved optimizers and seed.
    The options of the optimizer's groups are taken from the checkpoint.

    Args:
        path: a checkpoint, or a folder of them: then the newest is loaded.
        ema: the average to load; needed if and only if one was saved.

    Raises:
        ValueError: there is none, a file is missing or damaged, or it belongs to another model, optimizer or seed;
            nothing has been changed.
        OSError: a verified file could not be read; build the engine anew.
        RuntimeError: another rank's error.
    """
    engine.check_between_steps("plait.load")
    if ema is not None:
        ema.check_of(engine)
    comm = engine.comm
    saved = read_together(path, comm)
    with together(comm), _offering_another(saved.folder):
        for name in sorted(saved.manifest.files)[comm.rank :: comm.world_size]:
            saved.check_file(name)
    with together(comm):
        with _offering_another(saved.folder):
            state = saved.values()
        check_fits(engine, ema, state, saved)
        engine.check_step_state(state["run"])
    with together(comm), _offering_another(saved.folder):
        engine.load_step_state(state["run"])
        engine.load_weights(StoredWeights(weights_of(engine, saved)))
        if engine.optimizers:
            engine.load_optimizer_state_dict(state["optimizer"])
        if ema is not None:
            ema.decay = state["ema"]
            ema.load_full_state_dict(saved.kind("ema"))  # type: ignore[arg-type]
        extra = saved.value("extra")  # read whole; a rank has only read its part of the rest
    return Loaded(saved.folder, saved.manifest.step, extra)


def read_together(path: str | Path, comm: Comm) -> Checkpoint:
    """Returns the checkpoint that rank 0 finds; all ranks call it together."""
    folder, data = folder_at(path), b""
    with together(comm):
        if not comm.rank:
            folder = find(folder)
            with _offering_another(folder):
                data = read_manifest(folder)
    where, data = broadcast_bytes(comm, os.fsencode(str(folder)) + b"\0" + data, Note("state")).split(b"\0", 1)
    with together(comm), _offering_another(folder := Path(os.fsdecode(where))):
        return Checkpoint(folder, parse_manifest(folder, data))


def read_values(folder: Path) -> Any:
    """Returns everything but tensors, from the manifest alone, in one process; ValueError if it is damaged."""
    with _offering_another(folder):
        return Checkpoint.find(folder).values()


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """Raises any rank's error on all ranks."""
    error: Exception | None = None
    try:
        yield
    except (OSError, ValueError) as problem:
        error = problem
        if isinstance(problem, ValueError):  # it may quote names from files
            problem.args = (one_line(str(problem), LONGEST),)
    check_together(comm, error, AXES)


@contextmanager
def _offering_another(folder: Path) -> Iterator[None]:
    """Names the checkpoint before this one in an error about it."""
    try:
        yield
    except ValueError as error:
        real = folder.resolve()
        others = checkpoints(real.parent)
        before = others[: others.index(real)] if real in others else []
        fix = f"the one before it is {str(before[-1])!r}" if before else "there is none before it"
        raise ValueError(f"{error}; the checkpoint cannot be loaded, and {fix}") from error
