"""``plait.load``: a checkpoint of any layout goes into any other; each rank reads only its own regions.

rank 0      finds the checkpoint, reads the manifest                      its text goes to all
each rank   file i, where i = rank modulo ranks: size, hash, header    all hear of one that is wrong
            names, shapes, groups, seed against the engine                refused before anything is changed
            its own regions of weights, buffers, optimizer state, average
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint.complete import check_complete
from plait.checkpoint.folder import checkpoints, contents, find, parse_manifest, place, read_manifest, removed
from plait.checkpoint.hashing import threads_for
from plait.checkpoint.manifest import LARGEST, NAME, Manifest
from plait.checkpoint.storage import Storage
from plait.checkpoint.stored import SavedTensor, SavedWeights, check_contents, is_same, saved_tensors
from plait.checkpoint.values import decoded, state_of
from plait.comm import Comm
from plait.comm.agree import broadcast_bytes, check_together
from plait.messages.escape import one_line
from plait.step import EMA, Engine
from plait.table.collectives import Note
from plait.table.mesh import AXES

LONGEST = 1900
"""Characters of an error."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded."""

    path: Path | str
    """The checkpoint's folder, or its URL."""
    step: int
    """Steps made when it was saved."""
    extra: Any
    """As it was given to ``plait.save``, on every rank."""


def load(path: str | Path, engine: Engine, *, ema: EMA | None = None) -> Loaded:
    """Go on with a run that ``plait.save`` saved, under any layout; all ranks call it together.

    Every file is verified first.  The model has the names and shapes of the one that was saved; the engine has its
    optimizers (their groups' options are those that were saved) and its seed; ``ema`` is given where one was saved.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is loaded; a folder, or a URL as for ``save``.

    Raises:
        ValueError: there is none, a file is missing or damaged, or it is not of this model, these optimizers, this
            seed; nothing has been changed.
        OSError: a file that was verified could not be read; build the engine anew.
        RuntimeError: what another rank raises.
    """
    engine.check_between_steps("plait.load")
    if ema is not None:
        ema.check_of(engine)
    comm = engine.comm
    folder, manifest = read_together(path, comm)
    with _together(comm):
        for number, name in enumerate(sorted(manifest.files)):
            if number % comm.world_size == comm.rank:
                with _offering_another(folder):
                    check_contents(folder, name, manifest, threads_for(comm.local_world_size))
    tensors = saved_tensors(folder, manifest)
    with _together(comm):
        with _offering_another(folder):
            state = state_of(manifest, tensors)
        _check_fits(engine, ema, state, tensors)
        engine.check_step_state(state["run"])
    with _together(comm):
        engine.load_step_state(state["run"])
        engine.load_weights(SavedWeights(_weights(engine, tensors)))
        if engine.optimizers:
            engine.load_optimizer_state_dict(state["optimizer"])
        if ema is not None:
            ema.decay = state["ema"]
            ema.load_full_state_dict(_of("ema", tensors))  # type: ignore[arg-type]
        (given,) = [value for key, value in manifest.values["dict"] if key == "extra"][-1:]
        extra = decoded(given, lambda name: tensors[name].whole())  # of all else a rank has read its part
    return Loaded(folder.given(), manifest.step, extra)


def read_together(path: str | Path | Storage, comm: Comm) -> tuple[Storage, Manifest]:
    """The checkpoint's folder and its manifest, as rank 0 sees them."""
    folder, data = place(path), b""
    with _together(comm):
        if not comm.rank:
            folder = find(folder)
            with _offering_another(folder):
                data = contents(folder / NAME, LARGEST)
    where, data = broadcast_bytes(comm, os.fsencode(str(folder)) + b"\0" + data, Note("state")).split(b"\0", 1)
    with _together(comm), _offering_another(folder := place(os.fsdecode(where))):
        manifest = parse_manifest(folder, data)
    return folder, manifest


def read_values(folder: Storage) -> Any:
    """What a checkpoint has besides tensors; no file is opened but its manifest.  For one process alone.

    Raises:
        ValueError: it is damaged.
    """
    with _offering_another(folder):
        manifest = read_manifest(folder)
        return state_of(manifest, saved_tensors(folder, manifest))


@contextmanager
def _together(comm: Comm) -> Iterator[None]:
    """What a rank cannot read, all ranks raise."""
    error: Exception | None = None
    try:
        yield
    except (OSError, ValueError) as problem:
        error = problem
        if isinstance(problem, ValueError):  # with names from files
            problem.args = (one_line(str(problem), LONGEST),)
    check_together(comm, error, AXES)


@contextmanager
def _offering_another(folder: Storage) -> Iterator[None]:
    """An error in a checkpoint names the one before it."""
    try:
        yield
    except ValueError as error:
        if removed(folder):
            raise
        home, name = folder.home()
        others = checkpoints(home)
        names = [other.name for other in others]
        before = others[: names.index(name)] if name in names else []
        fix = f"the one before it is {str(before[-1])!r}" if before else "there is none before it"
        raise ValueError(f"{error}; the checkpoint cannot be loaded, and {fix}") from error


def _of(kind: str, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """Tensors of a kind, by the rest of their names."""
    return {name.removeprefix(f"{kind}/"): saved for name, saved in tensors.items() if name.startswith(f"{kind}/")}


def _weights(engine: Engine, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """Parameters and buffers by the engine's names; other programs save a tied weight under all of its names."""
    found: dict[str, SavedTensor] = {}
    for name, saved in _of("model", tensors).items():
        own = engine.directory.aliases.get(name, name)
        first = found.setdefault(own, saved)
        if first is not saved and not is_same(first, saved):
            raise ValueError(f"{name!r} is {own!r} in the model, and another value in the checkpoint")
    return found


def _check_fits(engine: Engine, ema: EMA | None, state: Any, tensors: Mapping[str, SavedTensor]) -> None:
    """Raises ValueError where the checkpoint is not that of a run of this engine."""
    names = dict.fromkeys(engine.directory.aliases.values())
    _check_names("model", {name: engine.directory.shapes[name] for name in names}, _weights(engine, tensors))
    for what, mine, saved, fix in (
        ("an optimizer", bool(engine.optimizers), state["optimizer"] is not None, "Engine(optimizer=...)"),
        (
            "an average of the weights",
            ema is not None,
            state["ema"] is not None,
            "plait.load(..., ema=plait.EMA(engine))",
        ),
    ):
        if mine != saved:
            here, there = ("was given", "has none") if mine else ("has none here", "was saved with one")
            raise ValueError(
                f"{what}: the engine {here}, and the checkpoint {there}; {fix if saved else 'leave it out'}"
            )
    if engine.optimizer_state is not None:
        engine.take_new_groups()
        engine.optimizer_state.check(state["optimizer"])
        if state["optimizer_classes"] is not None:
            engine.optimizer_state.check_classes(state["optimizer"], state["optimizer_classes"])
    check_complete(engine, state, tensors)
    if ema is not None:
        averaged = {engine.directory.aliases.get(name, name) for name in engine.exchange.names}
        _check_names("average", {name: engine.directory.shapes[name] for name in averaged}, _of("ema", tensors))


def _check_names(what: str, own: Mapping[str, Any], saved: Mapping[str, SavedTensor]) -> None:
    missing = sorted(name for name, (shape, _) in own.items() if name not in saved and math.prod(shape))
    surplus = sorted(saved.keys() - own.keys())  # of what has no element nobody has a piece
    if missing or surplus:
        raise ValueError(
            f"the checkpoint is not of this {what}: {len(missing)} tensors are missing {missing[:3]}, {len(surplus)} "
            f"are surplus {surplus[:3]}"
        )
    for name in own.keys() & saved.keys():
        (shape, dtype), there = own[name], saved[name].stored
        if there.shape != shape:
            raise ValueError(f"{name!r} of the {what} has shape {shape}, and {there.shape} in the checkpoint")
        if there.dtype != dtype and not (there.dtype.is_floating_point and dtype.is_floating_point):
            raise ValueError(f"{name!r} of the {what} is of {dtype}, and of {there.dtype} in the checkpoint")
