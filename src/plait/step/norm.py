"""The global norm, which counts every element once, however many ranks have it.

a run of ...             is on                                 and is counted by
any parameter            the ranks with the optimizer's piece  the first of them
one cut over tensor      one tensor rank                       that one
experts                  one rank of an expert group           that one
one whole over tensor    every tensor rank                     the first
one on several stages    each of them                          the first
"""

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from plait.comm import Comm
from plait.table.cells import DENSE, EXPERTS, Strategy
from plait.table.mesh import DATA_AXES
from plait.torch_private import foreach_norm
from plait.zero.owned import Owned

SQUARED = 1 << 16
"""Elements squared at once: torch converts them to fp64 for the sum, and this many still fit in the cache."""


class Norm:
    """Decides which rank counts a run; ``dtypes``: the gradients'; ``copies``: flats, by ``id``, that are copies."""

    def __init__(
        self, comm: Comm, strategy: Strategy, dtypes: Collection[torch.dtype], copies: Collection[int] = ()
    ) -> None:
        copied = [axis for axis in DATA_AXES if axis not in strategy.optim.split]
        self.first_copy = {axes: comm.mesh.index(comm.rank, axes.of(copied)) == 0 for axes in (DENSE, EXPERTS)}
        self.copies = copies
        self.dtype = dtype_of_norm(dtypes)

    def counts(self, owned: Owned) -> bool:
        """True if this rank adds a run's squares: the first of the ranks with the same run does."""
        first = self.first_copy[owned.flat.axes] and (owned.cut is not None or owned.flat.tensor_rank == 0)
        return first and id(owned.flat) not in self.copies


def block_norms(runs: Iterable[Tensor]) -> Sequence[Tensor]:
    """The norms in fp64 of the blocks of some runs."""
    reals = (torch.view_as_real(run) if run.is_complex() else run for run in runs)
    blocks = [block for real in reals for block in real.reshape(-1).split(SQUARED)]
    return foreach_norm(blocks, 2, dtype=torch.float64) if blocks else ()


def sum_squares(norms: Iterable[float]) -> float:
    """The sum of squares of elements whose blocks have these norms."""
    return math.fsum(norm * norm for norm in norms)


def dtype_of_norm(dtypes: Collection[torch.dtype]) -> torch.dtype:
    """The dtype for the norm of gradients of these dtypes: fp32 at least."""
    return torch.float64 if torch.float64 in dtypes or torch.complex128 in dtypes else torch.float32


def norm_of(squares: float, dtype: torch.dtype) -> float:
    """The norm with this sum of squares, rounded once to ``dtype``."""
    return torch.tensor(math.sqrt(squares), dtype=dtype).item()


@torch.no_grad()
def scale(runs: Iterable[Tensor], factor: float) -> None:
    """Multiplies gradients in place; ``_foreach_mul_`` would round the factor to bf16 first, and so change bits."""
    for run in runs:
        run.mul_(factor)


def check_limit(limit: float | None) -> None:
    """Raises ValueError for a norm that no gradient can be clipped to."""
    if limit is not None and not limit > 0:
        raise ValueError(f"clip={limit}: it is the largest norm of the gradients, above 0 (math.inf only measures)")


def clip_factor(norm: float, limit: float) -> float:
    """The factor that clips gradients of this norm, as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    return min(1.0, limit / (norm + 1e-6))
