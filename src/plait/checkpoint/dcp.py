"""Folders of torch.distributed.checkpoint, to plait and back: what users of FSDP2 save with ``get_state_dict``.

    {"model": {name: tensor},                                     model/name
     "optim": {"state": {name: {"step": 3., "exp_avg": tensor}},  a number; optimizer/exp_avg/name
               "param_groups": [{"params": [name], "lr": ...}]},  the groups
     "epoch": 3, ...}                                             extra

Both may stand below one more key, as under a ``Stateful``, and the optimizer's state may be flattened
(``state.name.exp_avg``).  A folder with nothing but tensors is a model.
"""

import io
import math
import os
import pickle
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as form
from torch.distributed.checkpoint.filesystem import _StorageInfo

from plait.checkpoint.distcp import METADATA, Misread, read_folder
from plait.checkpoint.manifest import Manifest
from plait.checkpoint.saved import Saved, Whole, write_checkpoint
from plait.checkpoint.storage import Storage
from plait.checkpoint.values import InFile, encoded
from plait.table.layout import Region, extent

Keys: TypeAlias = tuple[str | int, ...]
VERSION = "1.0.0"
"""Of the metadata that torch 2.13 writes."""


# ---- in -------------------------------------------------------------------------------------------------------------


def import_dcp(
    folder: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    seed: int = 0,
    without: Sequence[str] = (),
    ranks: int = 1,
) -> Storage:
    """Write what a folder of torch.distributed.checkpoint has as a checkpoint; the one in ``out`` is returned.

    Args:
        step: steps made; the optimizer's own count unless given.
        seed: of the engine that will load it.
        without: keys that are left out, with all below them.
        ranks: in how many files it is written.

    Raises:
        ValueError: it is damaged, names what torch does not write, or has an entry that is not understood.
    """
    entries = {path: value for path, value in read_folder(Path(folder)).items() if not _is_below(path, without)}
    strange = {_key(path): value.reason for path, value in entries.items() if isinstance(value, Misread)}
    if strange:
        told = "; ".join(f"{key!r}: {reason}" for key, reason in list(strange.items())[:3])
        raise ValueError(
            f"{len(strange)} entries of {str(folder)!r} are not understood ({told}): leave them out with "
            f"--without {next(iter(strange))!r}"
        )
    tree = _nested(entries)
    model, optimizer, extra = _parts(tree, str(folder))
    tensors = {f"model/{name}": value for name, value in model.items()}
    state = None if optimizer is None else _optimizer(optimizer, {n: w.shape for n, w in model.items()}, tensors)
    made = _steps(state) if step is None else step
    run = {"step": made, "seed": seed, "loss_scale": None}
    values = {"optimizer": state, "run": run, "ema": None, "extra": _named(extra, tensors) or None}
    values["optimizer_classes"] = None
    return write_checkpoint(out, Manifest("", made, {}, {}, encoded(values, {})), tensors, ranks)


def _is_below(path: Keys, keys: Sequence[str]) -> bool:
    return any(_key(path) == key or _key(path).startswith(f"{key}.") for key in keys)


def _key(path: Keys) -> str:
    return ".".join(map(str, path))


def _nested(entries: Mapping[Keys, Any]) -> Any:
    """Paths as dicts and lists."""
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


def _parts(tree: Mapping[str | int, Any], folder: str) -> tuple[dict[str, Whole], Any, dict[Any, Any]]:
    """(the model's tensors, the optimizer's state or None, all else)."""
    if tree and all(isinstance(value, Whole) for value in tree.values()):
        return {str(name): value for name, value in tree.items()}, None, {}
    homes = [tree, *(value for value in tree.values() if isinstance(value, dict))]
    home = next((one for one in homes if isinstance(one.get("model"), dict)), None)
    if home is None:
        raise ValueError(
            f"{folder!r} has the keys {', '.join(map(repr, list(tree)[:8]))}: a model stands under 'model', an "
            f"optimizer's state under 'optim' or 'optimizer', both at the top or below one key"
        )
    model = _flat(home["model"])
    if strange := [name for name, value in model.items() if not isinstance(value, Whole)]:
        raise ValueError(
            f"{len(strange)} entries of the model in {folder!r} are no tensors: {strange[:3]}; leave them out"
        )
    which = next((key for key in ("optim", "optimizer") if isinstance(home.get(key), dict)), None)
    used = ("model", which)
    extra = {key: value for key, value in home.items() if key not in used}
    if home is not tree:
        extra |= {key: value for key, value in tree.items() if value is not home}
    return model, None if which is None else home[which], extra


def _flat(tree: Any) -> dict[str, Any]:
    """Values by their keys; ValueError where two paths make one key."""
    leaves = list(_leaves(tree))
    found = {_key(path): value for path, value in leaves}
    if len(found) < len(leaves):
        raise ValueError("two of its paths make one key")
    return found


def _optimizer(given: Mapping[Any, Any], shapes: Mapping[str, tuple[int, ...]], tensors: dict[str, Whole]) -> Any:
    """An optimizer's state as the manifest has it; its tensors are added to ``tensors``."""
    rest = {key: value for key, value in given.items() if key not in ("state", "param_groups")}
    state, groups = given.get("state", {}), given.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        state, groups, rest = _unflattened(given, shapes)
    if rest or not isinstance(state, dict) or not all(isinstance(own, dict) for own in state.values()):
        raise ValueError(
            f"the optimizer's state has not the form of torch's get_optimizer_state_dict: {list(given)[:5]}"
        )
    named: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        if name not in shapes:
            raise ValueError(f"the optimizer has a state of {name!r}, which the model has not")
        for key, value in own.items():
            if isinstance(value, Whole) and value.shape and value.shape == shapes[name]:
                tensors[f"optimizer/{key}/{name}"] = value
                value = InFile(f"optimizer/{key}/{name}")
            named.setdefault(name, {})[key] = _named(value, tensors)
    kept = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    for group in kept:
        names = group.get("params")
        if not isinstance(names, list) or not all(name in shapes for name in names):
            raise ValueError("a group of the optimizer has other parameters than names of the model's")
    return {"state": named, "param_groups": _named(kept, tensors)}


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


def _named(value: Any, tensors: dict[str, Whole]) -> Any:
    """A value whose tensors are in ``tensors``, under new names; one of no dim is a number."""
    if isinstance(value, Whole):
        if not value.shape:
            return value.read(())
        name = f"value/{sum(one.startswith('value/') for one in tensors)}"
        tensors[name] = value
        return InFile(name)
    if isinstance(value, dict):
        return {key: _named(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_named(one, tensors) for one in value)
    return value


def _steps(state: Any) -> int:
    """Steps that an optimizer says it has made."""
    counts = [own.get("step") for own in (state or {"state": {}})["state"].values()]
    numbers = [float(one) for one in counts if isinstance(one, int | float | Tensor)]
    return int(max((number for number in numbers if math.isfinite(number)), default=0))


# ---- out ------------------------------------------------------------------------------------------------------------


def export_dcp(saved: Saved, out: str | Path, *, ties: Mapping[str, str] | None = None) -> None:
    """Write a checkpoint as a folder that ``torch.distributed.checkpoint.load`` reads.

    It has ``model`` and ``optim`` as ``get_state_dict`` names them, ``ema`` where there is an average, and ``extra``.

    Args:
        ties: other names of weights, as a model that shares them has in its ``state_dict()``: {name: the one saved}.

    Raises:
        ValueError: the checkpoint is damaged, the folder exists, or a tie is of a name that it has not.
    """
    saved.check()
    tensors = saved.tensors
    model = saved.kind("model")
    for name, own in (ties or {}).items():
        if own not in model or name in model:
            raise ValueError(f"{name}={own}: the checkpoint has to have {own!r}, and not {name!r}")
        model[name] = model[own]
    values = saved.values(tensors)
    tree: dict[str, Any] = {"model": model, "optim": values["optimizer"], "ema": saved.kind("ema")}
    tree = {key: value for key, value in tree.items() if value} | {"run": values["run"], "extra": values["extra"]}
    folder = Path(out)
    if os.path.lexists(folder):
        raise ValueError(f"{str(folder)!r} exists already: export to a new folder")
    hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    hidden.mkdir(parents=True)
    try:
        _write_dcp(hidden, dict(_leaves(tree)))
        hidden.rename(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _leaves(tree: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """What torch's planner makes of a nested state: dicts are opened, and lists that have tensors or dicts in them."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list) and _is_opened(tree):
        for number, value in enumerate(tree):
            yield from _leaves(value, (*path, number))
    else:
        yield path, tree


def _is_opened(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(one, Tensor | Whole) or _is_opened(one) for one in value)
    return isinstance(value, dict)


def _itself(tensor: Tensor, region: Region) -> Tensor:
    return tensor


def _write_dcp(folder: Path, leaves: Mapping[Keys, Any]) -> None:
    """The records of all leaves in one file, and the metadata."""
    file = "__0_0.distcp"
    kinds: dict[str, Any] = {}
    places: dict[form.MetadataIndex, _StorageInfo] = {}
    written: dict[int, tuple[Any, dict[Any, _StorageInfo]]] = {}
    with (folder / file).open("xb") as stream:

        def put(value: Any) -> _StorageInfo:
            begin, whole = stream.tell(), io.BytesIO()
            torch.save(value, whole)  # onto a full disk it would raise what says nothing of the disk
            stream.write(whole.getbuffer())
            return _StorageInfo(file, begin, stream.tell() - begin)

        for path, value in leaves.items():
            key = _key(path)
            if isinstance(value, Tensor):
                value = Whole(value.dtype, (), partial(_itself, value))
            if not isinstance(value, Whole):
                kinds[key] = form.BytesStorageMetadata()
                places[form.MetadataIndex(key)] = put(value)
                continue
            if id(value) not in written:  # a tied weight is written once
                written[id(value)] = value, {region: put(block) for region, block in value.blocks(value.region)}
            chunks = []
            for region, info in written[id(value)][1].items():
                offsets = torch.Size(start for start, _ in region)
                chunks.append(form.ChunkStorageMetadata(offsets, torch.Size(extent(region))))
                places[form.MetadataIndex(key, offsets, len(chunks) - 1)] = info
            properties = form.TensorProperties(dtype=value.dtype)
            kinds[key] = form.TensorStorageMetadata(properties, torch.Size(value.shape), chunks)
        stream.flush()
        os.fsync(stream.fileno())
    paths = {_key(path): path for path in leaves}
    meta = form.Metadata(kinds, paths, places, form.StorageMeta(), VERSION)
    with (folder / METADATA).open("xb") as stream:
        pickle.dump(meta, stream)
        stream.flush()
        os.fsync(stream.fileno())
