"""Sets up every collective for repeated calls.  Sizes are those of the whole array, as in nccl-tests."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch

from plait.comm.base import Comm, Work
from plait.table.collectives import Note
from plait.table.mesh import AXES

NOTE = Note(phase="bench")

Collective: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather", "all_to_all"
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True)
class BenchOperation:
    """One collective on its own buffers."""

    bytes: int
    """Size of the whole array, rounded up to equal pieces."""
    call: Callable[[], Work]

    def run(self) -> None:
        """Calls it and waits for the result."""
        self.call().wait()


def build(kind: str, comm: Comm, size: int) -> BenchOperation:
    """Sets up the collective ``kind`` over all ranks, on a whole array of at least ``size`` bytes of float32."""
    group = comm.mesh.group(comm.rank, AXES)
    n, root = len(group), comm.rank == group[0]
    piece = max(1, -(-size // (4 * n)))
    whole, full = (torch.zeros(n * piece, device=comm.device) for _ in range(2))
    mine, out = (torch.zeros(piece, device=comm.device) for _ in range(2))
    calls: dict[str, Callable[[], Work]] = {
        "all_reduce": partial(comm.all_reduce, whole, AXES, note=NOTE),
        "reduce_scatter": partial(comm.reduce_scatter, out, whole, AXES, note=NOTE),
        "all_gather": partial(comm.all_gather, full, mine, AXES, NOTE),
        "broadcast": partial(comm.broadcast, whole, AXES, 0, NOTE),
        "reduce": partial(comm.reduce, whole, AXES, 0, note=NOTE),
        "scatter": partial(comm.scatter, out, whole if root else None, AXES, 0, NOTE),
        "gather": partial(comm.gather, full if root else None, mine, AXES, 0, NOTE),
        "all_to_all": partial(comm.all_to_all, full, whole, AXES, NOTE),
    }
    return BenchOperation(4 * n * piece, calls[kind])
