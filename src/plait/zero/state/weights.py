"""Values that are read instead of drawn: each rank asks for its own elements, and reads them to where they stay.

    w (7 x 5) in a file         rank 1 of 2 has                        it asks for
    elements 0 .............34  elements 16..34 of its flat buffer     row 3 from column 1 on, rows 4..6

A tensor axis cuts before the data axes do, so a rank has a few regions of the whole parameter.
"""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from plait.table.region import Region
from plait.zero.place import fill_at_rest
from plait.zero.storage import Flat


class Weights(Protocol):
    """A source of values for a model's parameters, by the names that ``model.named_parameters()`` gives them."""

    def fill(self, name: str, region: Region, into: Tensor) -> None:
        """Writes a region of a parameter into memory of its shape, which may have another dtype, device and strides."""
        ...


def read_piece(weights: Weights, name: str, flat: Flat, index: int) -> None:
    """Reads the elements of a parameter that this rank has at rest."""
    fill_at_rest(flat, index, partial(weights.fill, name))


def read_whole(weights: Weights, name: str, into: Tensor) -> Tensor:
    """Reads all of a parameter or buffer into memory of its shape."""
    weights.fill(name, tuple((0, size) for size in into.shape), into)
    return into


def whole_values(model: nn.Module, weights: Weights, device: torch.device) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields every parameter on meta and its whole value in its own dtype."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            yield parameter, read_whole(weights, name, torch.empty_like(parameter, device=device, requires_grad=False))
