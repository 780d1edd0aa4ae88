"""Sets up every collective for repeated calls, with its known result.

Rank r contributes ``(r + 1) * pattern``, or its own piece of the pattern: integers so small that any order of additions
is exact, and the check is equality of whole tensors.  Sizes are those of the whole array, as in nccl-tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

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

    kind: str
    bytes: int
    """Size of the whole array, rounded up to equal pieces."""
    call: Callable[[], Work]
    result: Tensor | None
    """The tensor that receives this rank's result.  None if the rank gets none."""
    expected: Tensor

    def run(self) -> None:
        self.call().wait()

    def check(self) -> None:
        """Runs it once and compares the whole result.  Raises RuntimeError if this world computes something else."""
        self.run()
        if self.result is None or torch.equal(self.result, self.expected):
            return
        at = int((self.result != self.expected).nonzero()[0])
        raise RuntimeError(
            f"{self.kind} of {self.bytes} bytes is wrong from element {at} of {self.result.numel()} on: "
            f"{self.result[at].item():g} instead of {self.expected[at].item():g}"
        )


def build(kind: str, comm: Comm, size: int) -> BenchOperation:
    """Sets up the collective ``kind`` over all ranks, on a whole array of at least ``size`` bytes of float32."""
    group = comm.mesh.group(comm.rank, AXES)
    n, k = len(group), group.index(comm.rank)
    piece, root = max(1, -(-size // (4 * n))), k == 0
    pattern = (torch.arange(n * piece, dtype=torch.float32) % 97 + 1).to(comm.device)
    total, own = pattern * (n * (n + 1) // 2), pattern.view(n, piece)[k]
    whole, mine = pattern * (k + 1), own.clone()
    out, full = torch.zeros(piece, device=comm.device), torch.zeros_like(pattern)
    turned = torch.cat([own * (j + 1) for j in range(n)])
    given, gathered = (whole, full) if root else (None, None)
    operations: dict[str, tuple[Callable[[], Work], Tensor | None, Tensor]] = {
        "all_reduce": (partial(comm.all_reduce, whole, AXES, note=NOTE), whole, total),
        "reduce_scatter": (partial(comm.reduce_scatter, out, whole, AXES, note=NOTE), out, total.view(n, piece)[k]),
        "all_gather": (partial(comm.all_gather, full, mine, AXES, NOTE), full, pattern),
        "broadcast": (partial(comm.broadcast, whole, AXES, 0, NOTE), whole, pattern),
        "reduce": (partial(comm.reduce, whole, AXES, 0, note=NOTE), given, total),
        "scatter": (partial(comm.scatter, out, given, AXES, 0, NOTE), out, own),
        "gather": (partial(comm.gather, gathered, mine, AXES, 0, NOTE), gathered, pattern),
        "all_to_all": (partial(comm.all_to_all, full, whole, AXES, NOTE), full, turned),
    }
    return BenchOperation(kind, 4 * n * piece, *operations[kind])
