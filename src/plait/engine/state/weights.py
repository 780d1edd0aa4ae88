"""Values that are read instead of drawn: each rank asks for the rows that cover its pieces, and for nothing else.

    w (7 x 5) in a file         what rank 1 of 2 has                   what it reads
    elements 0 .............34  elements 16..34 of its flat buffer     rows 3..6

A tensor axis cuts before the data axes do, so rows of a rank's piece are one block of the whole parameter, or several
(see ``core.tensor_cut``).
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from plait.core.layout import Region, blocks
from plait.engine.data_parallel.storage import Flat

MOST = 1 << 22
"""Elements to read at a time: a request that is worth its way to an object store, and little beside a rank's pieces."""


class Weights(Protocol):
    """A source of values for a model's parameters, by the names that ``model.named_parameters()`` gives them."""

    def read(self, name: str, region: Region) -> Tensor:
        """A block of a parameter, in the dtype in which the source has it, on the CPU."""
        ...


def read_piece(weights: Weights, name: str, flat: Flat, index: int) -> None:
    """Read what this rank has at rest of a parameter, and write it into place, at most ``MOST`` elements at a time."""
    slot, cut = flat.layout.slots[index], flat.cuts[index]
    run = next((run for run in flat.layout.runs(*flat.held) if run.slot is slot), None)
    if run is None:
        return
    row = math.prod(slot.shape[1:])
    rows = (run.start // row, -(-run.stop // row))
    here = (rows, *((0, size) for size in slot.shape[1:])) if slot.shape else ()
    strides = [math.prod(slot.shape[dim + 1 :]) for dim in range(len(slot.shape))]
    for part in blocks(here, MOST):
        if cut is not None:
            value = torch.cat([weights.read(name, one) for one in cut.regions(flat.tensor_rank, part)], cut.dim)
        else:
            value = weights.read(name, part)
        flat.write(index, value, sum(low * stride for (low, _), stride in zip(part, strides, strict=True)))


def whole_values(model: nn.Module, weights: Weights, device: torch.device) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Every parameter that is on meta, and its whole value in its own dtype."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            value = weights.read(name, tuple((0, size) for size in parameter.shape))
            yield parameter, value.to(device, parameter.dtype, copy=True)
