"""What is lost between a save and a load is refused: everything that was saved has its place, every place its value.

A key that is gone would go on silently: an optimizer begins anew for one parameter, a group takes a default.  So the
state is held against itself (each tensor in a file is somebody's value, under its own name; what one parameter's state
has, that of its like has too) and against the engine (each option that a group has here).
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from plait.checkpoint.stored import SavedTensor
from plait.step import Engine
from plait.table.precision import LossScale


def check_complete(engine: Engine, state: Mapping[str, Any], tensors: Mapping[str, SavedTensor]) -> None:
    """Raises ValueError where something of a run's values or tensors is missing, surplus or under another name."""
    names = {id(saved): name for name, saved in tensors.items()}
    optimizer = state["optimizer"] or {"state": {}, "param_groups": []}
    used = {names[id(saved)] for saved in _tensors([optimizer, state["extra"]])}
    used |= {
        name for name in tensors if name.startswith("model/") or (name.startswith("ema/") and state["ema"] is not None)
    }
    if lost := sorted(tensors.keys() - used):
        raise ValueError(
            f"{len(lost)} tensors of the checkpoint are nobody's value, as {lost[0][:80]!r}: a key is lost"
        )
    for name, kept in optimizer["state"].items():
        for key, value in kept.items():
            place = names.get(id(value), "")
            if place.startswith("optimizer/") and place != f"optimizer/{key}/{name}":
                raise ValueError(
                    f"{key!r} of {name!r} is the tensor {place[:80]!r} in the checkpoint: a key has changed"
                )
    _check_alike(optimizer)
    if engine.optimizer_state is not None:
        _check_groups(engine.optimizer_state.groups(), optimizer["param_groups"])
    scale = state["run"]["loss_scale"]
    if scale is not None and scale.keys() != (own := {one.name for one in fields(LossScale)}):
        raise ValueError(f"the loss scale in the checkpoint has {sorted(scale)}, and {sorted(own)} make one")


def _tensors(value: Any) -> Iterator[SavedTensor]:
    if isinstance(value, SavedTensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _check_alike(optimizer: Mapping[str, Any]) -> None:
    """Parameters of one kind of group whose states have the same tensors have the same numbers."""
    known: dict[Any, tuple[str, set[str]]] = {}
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            kept = optimizer["state"].get(name)
            if kept:
                large = frozenset(key for key, value in kept.items() if isinstance(value, SavedTensor))
                other, keys = known.setdefault((frozenset(group), large), (name, set(kept)))
                if keys != set(kept):
                    raise ValueError(
                        f"the optimizer's state of {name!r} in the checkpoint has {sorted(kept)}, that of {other!r} "
                        f"has {sorted(keys)}: a key is lost"
                    )


def _check_groups(own: Iterator[tuple[list[str], Mapping[str, Any]]], saved: list[Mapping[str, Any]]) -> None:
    """Every option that a group has here is there, in the same form."""
    there = {frozenset(group["params"]): group for group in saved}
    for names, group in own:
        given = there.get(frozenset(names), {})
        for key, value in group.items() if given else ():
            other = given.get(key)
            form = len(other) if isinstance(other, tuple | list) else None
            if key not in given or (isinstance(value, tuple) and len(value) != form):
                raise ValueError(
                    f"the group of {names[0]!r} has {key} = {value!r} here, and in the checkpoint "
                    f"{other if key in given else 'nothing of this name'}: a key is lost (or the run had no schedule "
                    f"yet: then build it behind the load)"
                )
