"""A world that moves nothing and records everything.

One process plays one rank: it asks for what the engine would ask, the ledger keeps the lines, and no
byte goes anywhere.  On the ``meta`` device a run of any size costs no memory either, so the planner's
list can be held against the engine's for meshes that no machine at hand could hold.

    comm = TraceComm(Mesh(shard=64), rank=5, device="meta")
    ...
    comm.ledger.entries

What a collective would have written is left as it was; do not read it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm.base import DONE, Call, Comm, Incoming, Work
from plait.core.mesh import Mesh


class TraceComm(Comm):
    """Rank ``rank`` of a mesh whose other ranks do not exist."""

    def __init__(self, mesh: Mesh, rank: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__(mesh, rank, device=device)

    def check_together(self, error: BaseException | None, axes: object) -> None:
        """Raises this rank's own error; there are no others to ask."""
        if error is not None:
            raise error

    def _all_gather(self, call: Call, out: Tensor, piece: Tensor) -> Work:
        return DONE

    def _reduce_scatter(self, call: Call, out: Tensor, whole: Tensor) -> Work:
        return DONE

    def _all_reduce(self, call: Call, tensor: Tensor) -> Work:
        return DONE

    def _broadcast(self, call: Call, tensor: Tensor) -> Work:
        return DONE

    def _reduce(self, call: Call, tensor: Tensor) -> Work:
        return DONE

    def _scatter(self, call: Call, out: Tensor, whole: Tensor | None) -> Work:
        return DONE

    def _gather(self, call: Call, out: Tensor | None, piece: Tensor) -> Work:
        return DONE

    def _all_to_all(self, call: Call, out: Tensor, whole: Tensor) -> Work:
        return DONE

    def _send(self, call: Call, tensor: Tensor, dst: int, agreed: bool) -> Work:
        return DONE

    def _recv(self, call: Call, tensor: Tensor, src: int, agreed: bool) -> Work:
        return DONE

    def _recv_new(self, call: Call, src: int) -> Incoming:
        raise NotImplementedError("the trace world has no sender who could tell the shape of a message: use recv")

    def _barrier(self, call: Call) -> None:
        return None
