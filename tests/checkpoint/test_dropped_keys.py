"""A load that loses or renames any one thing of a checkpoint is refused: every tensor, every key of every value."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from run_cases import Training, differences

import plait
from plait.checkpoint.manifest import signed
from plait.comm import ThreadWorld
from plait.table.mesh import Mesh


def begun(change: int = 0) -> Training:
    """On one rank: two optimizers with groups, a schedule, a loss scale, an average, buffers, what is frozen."""
    return Training.begin(ThreadWorld(Mesh()).comm(0), "fp16", change)


def keys_within(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every key of the dicts in a manifest's values, and to every item of its lists."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from ((*path, number), *keys_within(one, (*path, number)))
    elif isinstance(value, dict) and "dict" in value:
        for number, (_, one) in enumerate(value["dict"]):
            yield from ((*path, "dict", number), *keys_within(one, (*path, "dict", number, 1)))
    elif isinstance(value, dict) and "tuple" in value:
        yield from keys_within(value["tuple"], (*path, "tuple"))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changes(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in data["tensors"]:
        for new in (None, f"{name}.new"):
            changed = copy.deepcopy(data)
            tensor = changed["tensors"].pop(name)
            if new:
                changed["tensors"][new] = tensor
            yield f"tensor {name}, {new}", changed
    for path in keys_within(data["values"]):
        for rename in (False, True):
            changed = copy.deepcopy(data)
            within = at(changed["values"], path[:-1])
            words = f"{[at(data['values'], path[:n])[0] for n in range(1, len(path) + 1) if path[n - 2] == 'dict']}"
            if not rename:
                del within[path[-1]]
            elif path[-2:-1] == ("dict",):
                within[path[-1]][0] = f"{within[path[-1]][0]}.new"
            else:
                continue
            yield f"value {path} {words} {'renamed' if rename else 'dropped'}", changed


def test_any_one_thing_that_is_lost_or_renamed_is_refused(tmp_path: Path) -> None:
    training = begun()
    training.go(0, 3)
    folder = plait.save(tmp_path, training.engine, ema=training.ema, extra=torch.arange(3))
    other = begun(1)
    before, manifest = other.state()[:4], folder / "manifest.json"
    text = manifest.read_text()
    found, silent = 0, []
    for what, data in changes(json.loads(text)):
        manifest.write_text(signed(json.dumps(data)))
        found += 1
        try:
            plait.load(folder, other.engine, ema=other.ema)
        except ValueError as error:
            assert len(str(error)) < 1000
            continue
        except Exception as error:
            what += f": {type(error).__name__}: {error}"
        silent.append(what)
        other = begun(1)
    assert not silent, "\n".join(silent)
    assert found > 200
    manifest.write_text(text)
    assert not differences(other.state()[:4], before), "nothing was changed"
    plait.load(folder, other.engine, ema=other.ema)
    assert not differences(other.state()[:4], training.state()[:4])
