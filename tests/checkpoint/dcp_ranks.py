"""One process of the tests of ``plait.Checkpointed``: ``python dcp_ranks.py <folder> <layout> ...``.

The first layout trains and saves.  Each other one loads what the one before it has saved, compares, saves its own, and
makes the next step; in the place of a layout, ``fsdp2`` is a program of torch that reads it.  Every rank writes what it
has found.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from run_cases import LAYOUTS, Training, decoder, differences, optimizers_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import plait
from plait.comm.process import ProcessComm
from plait.table.mesh import Mesh


def fsdp2(folder: Path, change: int) -> Any:
    """Parameters and optimizer state, whole, as an FSDP2 program of the same names has read them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = decoder()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(change)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    first, second = optimizers_of(model)
    app = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, (first, second))}
    dcp.load({"app": app}, checkpoint_id=folder)
    set_model_state_dict(model, app["model"])
    set_optimizer_state_dict(model, (first, second), app["optimizer"])
    whole = StateDictOptions(full_state_dict=True)
    read = get_model_state_dict(model, options=whole), get_optimizer_state_dict(model, (first, second), options=whole)
    return read


def main(folder: Path, layouts: list[str]) -> None:
    first = plait.join(LAYOUTS[layouts[0]][0], deadline=30)
    found: list[str] = []
    saved: Any = None
    losses: list[float] = []
    for number, layout in enumerate(layouts):
        before, own = folder / str(number - 1), folder / str(number)
        if layout == "fsdp2":
            model, optimizer = fsdp2(before, number)
            for what, ours, theirs in (
                ("model", model, saved[0]),
                ("optimizer", optimizer["state"], saved[2]["state"]),
            ):
                found += [f"fsdp2: {line}" for line in differences(ours, theirs, what)]
            continue
        store = dist.PrefixStore(str(number), dist.distributed_c10d._get_default_store())
        comm = ProcessComm(Mesh.parse(LAYOUTS[layout][0]), first.rank, store, deadline=30)
        training = Training.begin(comm, layout, change=number)
        if number:
            dcp.load({"app": plait.Checkpointed(training.engine, ema=training.ema)}, checkpoint_id=before)
            found += [f"{layout}: {line}" for line in differences(training.state()[:4], saved[:4])]
        else:
            training.go(0, 2)
        saved = training.state()
        app = {"app": plait.Checkpointed(training.engine, ema=training.ema)}
        if number % 2:  # while it goes on, over a group of its own
            future = dcp.async_save(app, checkpoint_id=own, process_group=dist.new_group(backend="gloo"))
            losses += training.go(2, 3)
            assert isinstance(future, Future)
            future.result()
            continue
        dcp.save(app, checkpoint_id=own)
        found += [f"{layout}, saving: {line}" for line in differences(training.state(), saved)]
        losses += training.go(2, 3)
    (folder / f"found-{first.rank}.json").write_text(json.dumps({"found": found, "losses": losses}))
    first.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]), sys.argv[2:])
