"""A rank's piece of a parameter that tensor parallelism cuts, and the whole from all pieces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.table.tensor_cut import TensorCut


def piece_of(whole: Tensor, cut: TensorCut, index: int) -> Tensor:
    """Rank ``index``'s piece of a tensor of the cut's shape; a view where the cut has one part."""
    runs = [whole.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges(index)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, cut.dim)


def assemble(pieces: Sequence[Tensor], cut: TensorCut) -> Tensor:
    """The whole tensor from the pieces of all ranks, in order."""
    whole = pieces[0].new_empty(cut.shape)
    for index, piece in enumerate(pieces):
        ranges = cut.ranges(index)
        for (start, stop), run in zip(ranges, piece.split([b - a for a, b in ranges], cut.dim), strict=True):
            whole.narrow(cut.dim, start, stop - start).copy_(run)
    return whole
