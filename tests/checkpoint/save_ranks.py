"""One process of the tests that end a save: ``python save_ranks.py <folder> <phase>``.

It takes up the newest checkpoint, if there is one, makes a step and saves; rank 1, or rank 0 where the phase is its
own, is killed in the middle of that save.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import plait

saving: Any = import_module("plait.checkpoint.save")
folders: Any = import_module("plait.checkpoint.folder")


def kill_before(module: Any, name: str, here: bool) -> None:
    original: Callable[..., Any] = getattr(module, name)

    def last(*args: Any) -> Any:
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(module, name, last)


def main(path: Path, phase: str) -> None:
    comm = plait.join("shard=3", deadline=20)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 23), torch.nn.Linear(23, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)
    if path.exists():
        print("loaded", plait.load(path, engine).step)
    engine.backward(model(torch.ones(2, 5)).square().sum(), 2)
    optimizer.step()
    match phase:
        case "writing":
            kill_before(saving, "write_tensors", comm.rank == 1)
        case "written":
            kill_before(saving, "publish", comm.rank == 0)
        case "renamed":  # what is flushed after the partial folder is the folder of the run
            flushed = folders.flush_folder
            folders.flush_folder = lambda p: os.kill(os.getpid(), signal.SIGKILL) if p == path else flushed(p)
    plait.save(path, engine)
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
