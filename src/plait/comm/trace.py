"""A world that moves nothing and records everything.

One process plays one rank, and the ledger keeps its requests.  On the ``meta`` device a run of any size costs no
memory, so the planner's list can be compared with the engine's for any mesh.

    comm = TraceComm(Mesh(shard=64), rank=5, device="meta")
    ...
    comm.ledger.entries

A collective leaves its result tensors as they were; do not read them.
"""

from typing import Any

import torch

from plait.comm.base import DONE, Comm
from plait.table.mesh import Mesh


class TraceComm(Comm):
    """Rank ``rank`` of a mesh whose other ranks do not exist."""

    def __init__(self, mesh: Mesh, rank: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__(mesh, rank, device=device)

    _nothing: Any = lambda *_: DONE
    _all_gather = _reduce_scatter = _all_reduce = _broadcast = _reduce = _nothing
    _scatter = _gather = _all_to_all = _send = _recv = _barrier = _nothing
