"""Bytes of any length from every rank, on rank 0: how records and logs come together."""

from __future__ import annotations

import torch

from plait.comm.base import Comm
from plait.core.collectives import Note
from plait.core.mesh import AXES

NOTE = Note("collect")


def collect(comm: Comm, data: bytes) -> list[bytes] | None:
    """Every rank's bytes, by rank, on rank 0; None on the others.  All ranks call it together."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    sizes = torch.empty(comm.mesh.size, dtype=torch.int64, device=comm.device)
    comm.all_gather(sizes, torch.tensor([len(mine)], device=comm.device), AXES, note=NOTE).wait()
    if comm.rank > 0:
        comm.send(mine.to(comm.device), 0, note=NOTE).wait()
        return None
    found = [data]
    for rank in range(1, comm.mesh.size):
        theirs = torch.empty(int(sizes[rank]), dtype=torch.uint8, device=comm.device)
        comm.recv(theirs, rank, note=NOTE).wait()
        found.append(theirs.cpu().numpy().tobytes())
    return found
