"""Every collective, ready to be called repeatedly, with its known result.

Rank r brings ``(r + 1) * pattern`` with integers small enough that any order of additions is exact,
so the check is equality of whole tensors.  S, the size of the whole array, is what nccl-tests counts:

    all_gather       a piece of S/n on each rank, S comes out
    reduce_scatter   S on each rank, a piece of S/n comes out
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.base import Comm, Work
from plait.core.collectives import Note
from plait.core.mesh import AXES

NOTE = Note(phase="bench")

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_to_all",
)


@dataclass(frozen=True)
class BenchOperation:
    """One collective on its own buffers."""

    kind: str
    bytes: int
    """Size of the whole array, rounded up to equal pieces."""
    call: Callable[[], Work]
    result: Tensor | None
    """Where this rank's result appears; None where it gets none."""
    expected: Tensor | None

    def check(self) -> None:
        """Calls it once and compares all of the result.

        Raises:
            RuntimeError: this world computes something else.
        """
        self.call().wait()
        if self.result is None or self.expected is None or torch.equal(self.result, self.expected):
            return
        at = int((self.result != self.expected).nonzero()[0])
        raise RuntimeError(
            f"{self.kind} of {self.bytes} bytes is wrong from element {at} of {self.result.numel()} on: "
            f"{self.result[at].item():g} instead of {self.expected[at].item():g}"
        )


def build(kind: str, comm: Comm, size: int) -> BenchOperation:
    """The collective ``kind`` over all ranks, on a whole array of at least ``size`` bytes of float32."""
    group = comm.mesh.group(comm.rank, AXES)
    n, k = len(group), group.index(comm.rank)
    piece = max(1, -(-size // (4 * n)))
    numel, root = n * piece, k == 0
    pattern = (torch.arange(numel, dtype=torch.float32) % 97 + 1).to(comm.device)
    total = pattern * (n * (n + 1) // 2)
    whole, out = pattern * (k + 1), torch.zeros(piece, device=comm.device)

    def cut(array: Tensor, index: int) -> Tensor:
        return array[index * piece : (index + 1) * piece]

    call: Callable[[], Work]
    result: Tensor | None
    expected: Tensor | None
    if kind == "all_reduce":
        call, result, expected = lambda: comm.all_reduce(whole, AXES, note=NOTE), whole, total
    elif kind == "reduce_scatter":
        call = lambda: comm.reduce_scatter(out, whole, AXES, note=NOTE)  # noqa: E731
        result, expected = out, cut(total, k)
    elif kind == "all_gather":
        mine, all_of_it = cut(pattern, k).clone(), torch.zeros_like(pattern)
        call = lambda: comm.all_gather(all_of_it, mine, AXES, NOTE)  # noqa: E731
        result, expected = all_of_it, pattern
    elif kind == "broadcast":
        call, result, expected = lambda: comm.broadcast(whole, AXES, 0, NOTE), whole, pattern
    elif kind == "reduce":
        call = lambda: comm.reduce(whole, AXES, 0, note=NOTE)  # noqa: E731
        result, expected = (whole, total) if root else (None, None)
    elif kind == "scatter":
        call = lambda: comm.scatter(out, whole if root else None, AXES, 0, NOTE)  # noqa: E731
        result, expected = out, cut(pattern, k)
    elif kind == "gather":
        mine, gathered = cut(pattern, k).clone(), torch.zeros_like(pattern) if root else None
        call = lambda: comm.gather(gathered, mine, AXES, 0, NOTE)  # noqa: E731
        result, expected = gathered, pattern if root else None
    elif kind == "all_to_all":
        turned = torch.zeros_like(pattern)
        call = lambda: comm.all_to_all(turned, whole, AXES, NOTE)  # noqa: E731
        result = turned
        expected = torch.cat([cut(pattern, k) * (j + 1) for j in range(n)])
    else:
        raise ValueError(f"no collective {kind!r} to measure: there are {', '.join(COLLECTIVES)}")
    return BenchOperation(kind, numel * 4, call, result, expected)
