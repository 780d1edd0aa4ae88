"""Two linear layers under zero3 on three threads: the small run that most tests of checkpoints save, break and load."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from torch import nn

from plait.comm import Comm, run
from plait.step import Engine
from plait.table.mesh import Mesh


def build(comm: Comm, change: float = 0.0, sizes: tuple[int, int] = (5, 23), **settings: Any) -> Engine:
    model = nn.Sequential(nn.Linear(*sizes), nn.Linear(*sizes[::-1]))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.linspace(-1, number / 9 + change, parameter.numel()) / sizes[0]
            parameter.copy_(values.view(parameter.shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Engine(model, comm, optimizer=optimizer, **{"strategy": "zero3", **settings})


def go(engine: Engine) -> None:
    engine.backward(engine.model(torch.ones(2, engine.model[0].in_features)).square().sum(), 2)
    engine.optimizers[0].step()


def state(engine: Engine) -> Any:
    return engine.full_state_dict(), engine.optimizer_state_dict(), engine.step_state()


def ranks(body: Callable[[Comm], Any], size: int = 3, deadline: float = 20) -> list[Any]:
    return run(Mesh(shard=size), body, deadline=deadline)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def raised_together(body: Callable[[Comm], Any], words: str) -> list[str]:
    """The error of each rank; all have these words."""

    def safe(comm: Comm) -> str:
        with pytest.raises((OSError, ValueError, RuntimeError)) as caught:
            body(comm)
        return f"{type(caught.value).__name__}: {caught.value}"

    said = ranks(safe)
    assert all(words in one for one in said), said
    return said


def processes(script: Path, size: int, *words: str | Path) -> str:
    """Runs a script in so many processes, as torchrun would; returns rank 0's output, and all must succeed."""
    folders = os.pathsep.join(filter(None, [str(script.parent), os.environ.get("PYTHONPATH", "")]))
    where = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    env = os.environ | {key: str(value) for key, value in where.items()} | {"PYTHONPATH": folders}
    command = [sys.executable, "-W", "ignore", str(script), *map(str, words)]
    begun = [
        subprocess.Popen(
            command, env=env | {"RANK": str(rank)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(size)
    ]
    outputs = [one.communicate(timeout=500)[0] for one in begun]
    assert not any(one.returncode for one in begun), outputs
    return outputs[0]
