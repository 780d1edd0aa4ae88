"""A load that loses or renames any one thing of a checkpoint is refused: every tensor, every key of every value."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from run_cases import differences
from torch import nn

import plait
from plait.checkpoint.manifest import signed
from plait.comm import ThreadWorld
from plait.table.mesh import Mesh
from plait.table.precision import LossScale


class Training:
    """Two optimizers with several groups, a schedule, a loss scale, an average, buffers, a frozen weight."""

    def __init__(self, change: float = 0.0) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(3, 2))
        self.model[2].weight.requires_grad_(False)
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(torch.linspace(-1, number / 9, parameter.numel()).view(parameter.shape) + change)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        first = torch.optim.AdamW([{"params": trained[:3]}, {"params": trained[3:4], "weight_decay": 0.2}], lr=0.01)
        second = torch.optim.SGD(trained[4:], lr=0.1, momentum=0.9)
        world = ThreadWorld(Mesh()).comm(0)
        self.schedule = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5) for one in (first, second)]
        scale = LossScale(8.0, interval=2)
        self.engine = plait.Engine(self.model, world, optimizer=[first, second], loss_scale=scale)
        self.ema = plait.EMA(self.engine, 0.9)

    def step(self) -> None:
        loss = self.model(torch.arange(15.0).view(5, 3).sin()).square().sum()
        self.engine.backward(loss, 5)
        for optimizer in self.engine.optimizers:
            optimizer.step()
        for schedule in self.schedule:
            schedule.step()
        self.ema.update()

    def state(self) -> Any:
        engine = self.engine
        whole = engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state(), self.ema.full_state_dict()
        return copy.deepcopy(whole)


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
        for new in (None, "model/new", f"{name}.new"):
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
    training = Training()
    for _ in range(3):
        training.step()
    folder = plait.save(tmp_path, training.engine, ema=training.ema, extra=torch.arange(3))
    other = Training(0.5)
    before, manifest = other.state(), folder / "manifest.json"
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
        other = Training(0.5)
    assert not silent, "\n".join(silent)
    assert found > 200
    manifest.write_text(text)
    assert not differences(other.state(), before), "nothing was changed"
    plait.load(folder, other.engine, ema=other.ema)
    assert not differences(other.state(), training.state())
