"""Checks a checkpoint against an engine before it is loaded: each value has its place, each place its value.

Names, shapes, groups and the classes of optimizers are compared with the engine's before anything is changed.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from plait.checkpoint.stored import Checkpoint, Stored
from plait.step import EMA, Engine
from plait.table.precision import LossScale


def weights_of(engine: Engine, saved: Checkpoint) -> dict[str, Stored]:
    """Parameters and buffers by the engine's names; other programs save a tied weight under all of its names."""
    found: dict[str, Stored] = {}
    for name, one in saved.kind("model").items():
        own = engine.placed.directory.aliases.get(name, name)
        first = found.setdefault(own, one)
        if first is not one and not first.equals(one):
            raise ValueError(f"{name!r} is {own!r} in the model, and another value in the checkpoint")
    return found


def check_fits(engine: Engine, ema: EMA | None, state: Any, saved: Checkpoint) -> None:
    """Raises ValueError unless the checkpoint is that of a run of this engine, and complete."""
    shapes, aliases = engine.placed.directory.shapes, engine.placed.directory.aliases
    _check_names("model", {name: shapes[name] for name in aliases.values()}, weights_of(engine, saved))
    for what, mine, theirs, fix in (
        ("an optimizer", bool(engine.optimizers), state["optimizer"] is not None, "Engine(optimizer=...)"),
        (
            "an average of the weights",
            ema is not None,
            state["ema"] is not None,
            "plait.load(..., ema=plait.EMA(engine))",
        ),
    ):
        if mine != theirs:
            here, there = ("was given", "has none") if mine else ("has none here", "was saved with one")
            raise ValueError(
                f"{what}: the engine {here}, and the checkpoint {there}; {fix if theirs else 'leave it out'}"
            )
    if engine.placed.optimizer_state is not None:
        engine.placed.optimizer_state.check(state["optimizer"])
        if state["optimizer_classes"] is not None:
            engine.placed.optimizer_state.check_classes(state["optimizer"], state["optimizer_classes"])
    scale, own = state["run"]["loss_scale"], {one.name for one in fields(LossScale)}
    if scale is not None and scale.keys() != own:
        raise ValueError(f"the loss scale in the checkpoint has {sorted(scale)}, and {sorted(own)} make one")
    if ema is not None:
        averaged = {aliases.get(name, name) for name in engine.placed.exchange.names}
        _check_names("average", {name: shapes[name] for name in averaged}, saved.kind("ema"))


def _check_names(what: str, own: Mapping[str, Any], saved: Mapping[str, Stored]) -> None:
    missing = sorted(name for name, (shape, _) in own.items() if name not in saved and math.prod(shape))
    surplus = sorted(saved.keys() - own.keys())  # an empty tensor has no pieces, so it is never saved
    if missing or surplus:
        raise ValueError(
            f"the checkpoint is not of this {what}: {len(missing)} tensors are missing {missing[:3]}, {len(surplus)} "
            f"are surplus {surplus[:3]}"
        )
    for name in own.keys() & saved.keys():
        (shape, dtype), there = own[name], saved[name]
        if there.shape != shape:
            raise ValueError(f"{name!r} of the {what} has shape {shape}, and {there.shape} in the checkpoint")
        if there.dtype != dtype and not (there.dtype.is_floating_point and dtype.is_floating_point):
            raise ValueError(f"{name!r} of the {what} is of {dtype}, and of {there.dtype} in the checkpoint")
