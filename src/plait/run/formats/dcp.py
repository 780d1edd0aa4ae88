"""Converts folders of torch.distributed.checkpoint, as FSDP2 users save with ``get_state_dict``, to plait and back.

    {"model": {name: tensor},                                     model/name
     "optim": {"state": {name: {"step": 3., "exp_avg": tensor}},  a number; optimizer/exp_avg/name
               "param_groups": [{"params": [name], "lr": ...}]},  the groups
     "epoch": 3, ...}                                             extra

Model and optimizer may be below one more key, as under a ``Stateful``, and the optimizer's state may be flattened
(``state.name.exp_avg``).  A folder of tensors alone is a model.
"""

import errno
import math
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from plait.checkpoint.folder import begin, discard, folder_at, partial_of, publish
from plait.checkpoint.manifest import manifest_text
from plait.checkpoint.snapshot import RankPiece
from plait.checkpoint.stored import Checkpoint, Stored
from plait.checkpoint.values import InFile, encoded
from plait.checkpoint.writing import write_part
from plait.messages.progress import counted
from plait.run.formats.torch_folder import Keys, Misread, read_folder


def import_dcp(
    folder: str | Path, out: str | Path, *, step: int | None = None, seed: int = 0, without: Sequence[str] = ()
) -> Path:
    """Writes the contents of a folder of torch.distributed.checkpoint as a checkpoint; returns the one in ``out``.
    ValueError if it is damaged, names objects that torch does not write, or has an entry that is not understood.

    Args:
        step: the number of steps made; the optimizer's own count unless given.
        seed: the seed of the engine that will load it.
        without: keys to leave out, with all keys below them.
    """
    left_out = tuple(f"{key}." for key in without)
    found = read_folder(Path(folder))
    entries = {path: value for path, value in found.items() if not f"{_key(path)}.".startswith(left_out)}
    strange = {_key(path): value.reason for path, value in entries.items() if isinstance(value, Misread)}
    if strange:
        some = "; ".join(f"{key!r}: {reason}" for key, reason in list(strange.items())[:3])
        raise ValueError(
            f"{len(strange)} entries of {str(folder)!r} are not understood ({some}): leave them out with "
            f"--without {next(iter(strange))!r}"
        )
    model, optimizer, extra = _parts(_nested(entries), str(folder))
    tensors = {f"model/{name}": value for name, value in model.items()}
    state = None if optimizer is None else _optimizer(optimizer, {n: w.shape for n, w in model.items()}, tensors)
    made = _steps(state) if step is None else step
    run = {"step": made, "seed": seed, "loss_scale": None}
    values = {"optimizer": state, "run": run, "ema": None, "extra": extra or None, "optimizer_classes": None}
    return write_checkpoint(out, made, encoded(values, tensors), tensors)


def write_checkpoint(out: str | Path, step: int, values: Any, tensors: Mapping[str, Tensor]) -> Path:
    """Writes a checkpoint of these tensors and encoded values, in one file; returns it.  ValueError if ``out`` has one
    of this step."""
    own = secrets.token_hex(8)
    partial = partial_of(folder_at(out), step, own)
    lock = begin(partial)
    try:
        pieces = [RankPiece(name, t.shape, tuple((0, n) for n in t.shape), t) for name, t in tensors.items()]
        entries = write_part(partial, 0, pieces)
        return publish(partial, manifest_text(own, step, [entries], values), list(entries["files"]))
    except BaseException:
        with suppress(OSError):
            discard(partial)
        raise
    finally:
        lock.close()


def _key(path: Keys) -> str:
    return ".".join(map(str, path))


def _nested(entries: Mapping[Keys, Any]) -> Any:
    """Turns paths into nested dicts and lists."""
    if list(entries) == [()]:
        return entries[()]
    below: dict[str | int, dict[Keys, Any]] = {}
    for path, value in entries.items():
        if not path:
            raise ValueError("a key in it has both a value and keys below it")
        below.setdefault(path[0], {})[path[1:]] = value
    if below and all(type(key) is int for key in below):
        if set(below) != set(range(len(below))):
            raise ValueError("a list in it has gaps")
        return [_nested(below[number]) for number in range(len(below))]
    return {key: _nested(inside) for key, inside in below.items()}


def _parts(tree: Mapping[str | int, Any], folder: str) -> tuple[dict[str, Tensor], Any, dict[Any, Any]]:
    """Returns (the model's tensors, the optimizer's state or None, all else)."""
    if tree and all(isinstance(value, Tensor) for value in tree.values()):
        return {str(name): value for name, value in tree.items()}, None, {}
    homes = [tree, *(value for value in tree.values() if isinstance(value, dict))]
    home = next((one for one in homes if isinstance(one.get("model"), dict)), None)
    if home is None:
        raise ValueError(
            f"{folder!r} has the keys {', '.join(map(repr, list(tree)[:8]))}: a model is under 'model', an "
            f"optimizer's state under 'optim' or 'optimizer', both at the top or below one key"
        )
    model = _flat(home["model"])
    if strange := [name for name, value in model.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            f"{len(strange)} entries of the model in {folder!r} are not tensors: {strange[:3]}; leave them out"
        )
    which = next((key for key in ("optim", "optimizer") if isinstance(home.get(key), dict)), None)
    extra = {key: value for key, value in home.items() if key not in ("model", which)}
    extra |= {key: value for key, value in tree.items() if home is not tree and value is not home}
    return model, None if which is None else home[which], extra


def _flat(tree: Any, path: Keys = ()) -> dict[str, Any]:
    """The values of nested dicts by their keys, joined; ValueError if two of them make the same key."""
    if not isinstance(tree, dict):
        return {_key(path): tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inside = _flat(value, (*path, str(key)))
        if found.keys() & inside.keys():
            raise ValueError("two of its paths make one key")
        found |= inside
    return found


def _optimizer(given: Mapping[Any, Any], shapes: Mapping[str, tuple[int, ...]], tensors: dict[str, Tensor]) -> Any:
    """An optimizer's state in the manifest's form; its tensors are added to ``tensors``."""
    rest = {key: value for key, value in given.items() if key not in ("state", "param_groups")}
    state, groups = given.get("state", {}), given.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        state, groups, rest = _unflattened(given, shapes)
    if rest or not isinstance(state, dict) or not all(isinstance(own, dict) for own in state.values()):
        raise ValueError(
            f"the optimizer's state does not have the form of torch's get_optimizer_state_dict: {list(given)[:5]}"
        )
    named: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        if name not in shapes:
            raise ValueError(f"the optimizer has a state of {name!r}, which the model has not")
        for key, value in own.items():
            if isinstance(value, Tensor) and value.shape and value.shape == shapes[name]:
                tensors[f"optimizer/{key}/{name}"] = value
                value = InFile(f"optimizer/{key}/{name}")
            named.setdefault(name, {})[key] = value
    kept = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    for group in kept:
        names = group.get("params")
        if not isinstance(names, list) or not all(name in shapes for name in names):
            raise ValueError("a group of the optimizer has parameters that are no names of the model's")
    return {"state": named, "param_groups": kept}


def _unflattened(given: Mapping[Any, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, list[Any], Any]:
    """State, groups and the rest of ``flatten_optimizer_state_dict=True``; parameters of equal options are a group."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    rest = {}
    for key, value in _flat(dict(given)).items():
        kind, _, tail = key.partition(".")
        name, _, own = tail.rpartition(".")
        if kind not in ("state", "param_groups") or name not in shapes:
            rest[key] = value
        else:
            (state if kind == "state" else options).setdefault(name, {})[own] = value
    groups: dict[str, dict[str, Any]] = {}
    for name in (name for name in shapes if name in options):
        key = repr(sorted(options[name].items()))
        groups.setdefault(key, {**options[name], "params": []})["params"].append(name)
    return state, list(groups.values()), rest


def _steps(state: Any) -> int:
    """The number of steps that an optimizer reports."""
    counts = [own.get("step") for own in (state or {"state": {}})["state"].values()]
    numbers = [float(one) for one in counts if isinstance(one, int | float | Tensor)]
    return int(max((number for number in numbers if math.isfinite(number)), default=0))


def export_dcp(saved: Checkpoint, out: str | Path, *, ties: Mapping[str, str] | None = None) -> None:
    """Writes a checkpoint as a folder that ``torch.distributed.checkpoint.load`` reads; all of it is in memory.

    It has ``model`` and ``optim`` as ``get_state_dict`` names them, ``ema`` if there is an average, and ``extra``.
    ``ties`` are {other name: saved name} for shared weights that a model has twice in its ``state_dict()``.  ValueError
    if the checkpoint is damaged or lacks a tied name, or the folder exists.
    """
    saved.check()
    model = saved.kind("model")
    for name, own in (ties or {}).items():
        if own not in model or name in model:
            raise ValueError(f"{name}={own}: the checkpoint has to have {own!r}, and not {name!r}")
        model[name] = model[own]
    values = saved.values()
    tree: dict[str, Any] = {"model": model, "optim": values["optimizer"], "ema": saved.kind("ema")}
    tree = {key: value for key, value in tree.items() if value} | {"run": values["run"], "extra": values["extra"]}
    folder = folder_at(out)
    if os.path.lexists(folder):
        raise ValueError(f"{str(folder)!r} exists already: export to a new folder")
    hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    hidden.mkdir(parents=True)
    try:
        _save(hidden, _in_memory(tree))
        hidden.rename(folder)
    except RuntimeError as error:  # torch's own, if the disk refuses
        raise OSError(errno.EIO, " ".join(str(error).split())[:200], str(folder)) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _in_memory(value: Any) -> Any:
    if isinstance(value, Stored):
        return value.read()
    if isinstance(value, dict):
        return {key: _in_memory(value[key]) for key in counted("entries read", list(value))}
    return type(value)(map(_in_memory, value)) if isinstance(value, list | tuple) else value


def _save(folder: Path, tree: Any) -> None:
    """Performs torch's save by one process, step by step, so that errors arrive unchanged."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner(tree, is_coordinator=True)
    writer.set_up_storage_writer(True)
    (plan,), metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan([plan])
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
