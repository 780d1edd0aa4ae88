"""Checks a checkpoint against an engine before it is loaded: every value has its place, every place its value.

A missing key would otherwise pass in silence: an optimizer would begin anew for one parameter, a group would take a
default.  So the names, shapes and groups are compared with the engine's, and the state with itself: each tensor belongs
to some value, under its own name, and parameters whose states have the same tensors have the same numbers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
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
    _check_used(state, saved.tensors)
    if engine.placed.optimizer_state is not None:
        _check_options(engine.placed.optimizer_state.groups(), state["optimizer"]["param_groups"])
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


def _check_used(state: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    """Raises ValueError unless every tensor is used, under its own name, and similar parameters have similar states."""
    names = {id(one): name for name, one in tensors.items()}
    optimizer = state["optimizer"] or {"state": {}, "param_groups": []}
    used = {names[id(one)] for one in _stored([optimizer, state["extra"]])}
    kinds = ("model/", "ema/") if state["ema"] is not None else ("model/",)
    if lost := sorted(name for name in tensors.keys() - used if not name.startswith(kinds)):
        raise ValueError(
            f"{len(lost)} tensors in the checkpoint match no value (for example {lost[0][:80]!r}): a key was lost"
        )
    for name, kept in optimizer["state"].items():
        for key, value in kept.items():
            place = names.get(id(value), "")
            if place.startswith("optimizer/") and place != f"optimizer/{key}/{name}":
                raise ValueError(
                    f"{key!r} of {name!r} is the tensor {place[:80]!r} in the checkpoint: a key has changed"
                )
    known: dict[Any, tuple[str, set[str]]] = {}
    for group in optimizer["param_groups"]:
        for name in filter(optimizer["state"].get, group["params"]):
            kept = optimizer["state"][name]
            large = frozenset(key for key, value in kept.items() if isinstance(value, Stored))
            other, keys = known.setdefault((frozenset(group), large), (name, set(kept)))
            if keys != set(kept):
                raise ValueError(
                    f"the optimizer's state of {name!r} in the checkpoint has {sorted(kept)}, that of {other!r} has "
                    f"{sorted(keys)}: a key was lost"
                )


def _stored(value: Any) -> Iterator[Stored]:
    if isinstance(value, Stored):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _stored(one)


def _check_options(own: Iterable[tuple[list[str], Mapping[str, Any]]], saved: list[Mapping[str, Any]]) -> None:
    """Raises ValueError unless every option of a group here was saved, in the same form."""
    there = {frozenset(group["params"]): group for group in saved}
    for names, group in own:
        given = there.get(frozenset(names))
        for key, value in group.items() if given else ():
            assert given is not None
            other = given.get(key)
            form = len(other) if isinstance(other, tuple | list) else None
            if key not in given or (isinstance(value, tuple) and len(value) != form):
                raise ValueError(
                    f"the group of {names[0]!r} has {key} = {value!r} here, and in the checkpoint "
                    f"{other if key in given else 'nothing of this name'}: a key was lost (or the run had no schedule "
                    f"yet: then build it after the load)"
                )
