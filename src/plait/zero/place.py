"""The regions of the whole parameter that a run covers, and the memory at rest that whole tensors are written to.

    run 2..9 of this rank's rows of w        .  .  2  3        three regions of the whole w: the rest of a row,
                                             4  5  6  7        rows, the beginning of a row
                                             8  .  .  .

If the tensor axis cuts the parameter first, one region of this rank's part is one or several regions of the whole.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.table.flat import Run
from plait.table.region import Region, extent
from plait.table.tensor_cut import TensorCut
from plait.zero.storage import Flat


class Readable(Protocol):
    """A tensor, or an object that can be read like one, region by region: a slice of a file, a mapped array.

    An object that also has ``fill(region, into)`` writes a region straight into existing memory.
    """

    @property
    def shape(self) -> Any: ...

    def __getitem__(self, region: Any) -> Any: ...


@dataclass(frozen=True)
class RunPlace:
    """A run, and the cut of its parameter over the tensor axis, which comes first."""

    run: Run
    cut: TensorCut | None
    tensor_rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.run.slot.shape if self.cut is None else self.cut.shape

    def regions(self, values: Tensor) -> Iterator[tuple[Region, Tensor]]:
        """Yields regions of the whole parameter, with views of ``values`` (one per element of the run) there."""
        flat, done = values.view(-1), 0
        for local in self.run.regions():
            sizes = extent(local)
            part = flat[done : done + math.prod(sizes)].view(sizes)
            done += part.numel()
            places = self._places(local)
            lengths = [extent(place)[self.cut.dim] for place in places] if self.cut else []
            yield from zip(places, part.split(lengths, self.cut.dim) if self.cut else (part,), strict=True)

    def fill(self, whole: Readable, into: Tensor) -> None:
        """Writes the run's elements, flat, into existing memory, from a source with one value per parameter element."""
        fill = getattr(whole, "fill", None)
        for region, part in self.regions(into):
            if fill is None:
                part.copy_(torch.as_tensor(whole[tuple(slice(*ends) for ends in region)]))
            else:
                fill(region, part)

    def _places(self, local: Region) -> tuple[Region, ...]:
        return (local,) if self.cut is None else self.cut.regions(self.tensor_rank, local)


def fill_at_rest(flat: Flat, index: int, fill: Callable[[Region, Tensor], object]) -> None:
    """Fills this rank's part of a parameter at rest; ``fill`` gets regions of the whole parameter, and their memory.

    If there are master weights, they are filled, and the values at rest are rounded from them.
    """
    (begin, end), (start, stop) = flat.rest_place, flat.optim_place
    parts = [(flat.rest, flat.rest_place)]
    if flat.master is not None:
        before, after = flat.rest[: start - begin], flat.rest[stop - begin :]
        parts = [(before, (begin, start)), (flat.master, (start, stop)), (after, (stop, end))]
    for memory, place in parts:
        if (run := flat.layout.run(index, *place)) is not None:
            elements = slice(run.offset, run.offset + run.numel)
            for region, part in RunPlace(run, flat.cuts[index], flat.tensor_rank).regions(memory[elements]):
                fill(region, part)
            if memory is flat.master:
                flat.updated_at_rest[elements].copy_(memory[elements])


def write_at_rest(flat: Flat, index: int, value: Tensor) -> None:
    """Writes this rank's part of a whole parameter to its memory at rest."""
    fill_at_rest(flat, index, lambda region, part: part.copy_(value[tuple(slice(*ends) for ends in region)]))
