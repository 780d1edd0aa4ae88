"""Parameters and optimizer state region by region, as this rank holds them, for checkpoints.

    name             key         region           tensor                     first
    blocks.0.weight              rows 0..3        of the optimizer's copy    other ranks with this piece do not write it
    blocks.0.weight  exp_avg     rows 0..3        of the optimizer's state

The tensors are views of the engine's own memory.  Over all ranks, the ``first`` pieces have every element once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from plait.table.region import Region
from plait.zero.place import RunPlace
from plait.zero.storage import Flat


@dataclass(frozen=True)
class StatePiece:
    """A region of a parameter, or of the optimizer's state for each of its elements."""

    name: str
    """The name of the parameter."""
    key: str
    """The optimizer's name for the state; empty: the values of the parameter."""
    region: Region
    """The region in the whole tensor."""
    tensor: Tensor
    """A view with the shape of the region."""
    first: bool
    """True if no lower rank has the region."""

    @classmethod
    def of(cls, name: str, key: str, place: RunPlace, values: Tensor, *, first: bool) -> Iterator["StatePiece"]:
        """The pieces of a run, given one value for each of its elements."""
        return (cls(name, key, region, tensor, first) for region, tensor in place.regions(values))


def frozen_pieces(flat: Flat, *, first: bool, names: set[str]) -> Iterator[StatePiece]:
    """Yields the pieces of a flat buffer that never trains; a parameter already in ``names`` is not first."""
    for run in flat.layout.runs(*flat.rest_place):
        name, cut = run.slot.name, flat.cuts[flat.layout.slots.index(run.slot)]
        alone = first and name not in names and (cut is not None or flat.tensor_rank == 0)
        place, values = RunPlace(run, cut, flat.tensor_rank), flat.rest[run.offset : run.offset + run.numel]
        yield from StatePiece.of(name, "", place, values, first=alone)
    names |= {slot.name for slot in flat.layout.slots}
