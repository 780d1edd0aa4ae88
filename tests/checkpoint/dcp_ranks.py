"""One process of the tests of ``plait.Checkpointed``: ``python dcp_ranks.py <folder> <layout> ...``, a layout each time.

The first layout trains, saves and goes on.  Each other one loads, saves its own, shows its state, and makes the next
step; at the end an FSDP2 program reads what the first one saved.  Rank 0 writes what all ranks have found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from run_cases import LAYOUTS, Training, differences

import plait
from plait.comm.process import ProcessComm
from plait.core.mesh import Mesh


def main(folder: Path, layouts: list[str]) -> None:
    world: dict[str, ProcessComm] = {}
    first = plait.join(LAYOUTS[layouts[0]][0], deadline=30)
    assert isinstance(first, ProcessComm)
    found: list[str] = []
    saved: Any = None
    losses: list[float] = []
    for number, layout in enumerate(layouts):
        mesh = Mesh.parse(LAYOUTS[layout][0])
        store = dist.PrefixStore(str(number), dist.distributed_c10d._get_default_store())
        comm = ProcessComm(mesh, first.rank, store, deadline=30)
        training = Training.begin(comm, layout, change=number)
        app = {"app": plait.Checkpointed(training.engine, ema=training.ema)}
        if number:
            dcp.load(app, checkpoint_id=folder / str(number - 1))
            found += [f"{layout}: {line}" for line in differences(training.state()[:4], saved[:4])]
        else:
            training.go(0, 2)
        saved = training.state()
        app = {"app": plait.Checkpointed(training.engine, ema=training.ema)}
        dcp.save(app, checkpoint_id=folder / str(number))
        found += [f"{layout}, saving: {line}" for line in differences(training.state(), saved)]
        losses += training.go(2, 3)
    if first.rank == 0:
        (folder / "found.json").write_text(json.dumps({"found": found, "losses": losses}))
    first.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]), sys.argv[2:])
