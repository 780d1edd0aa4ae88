"""The bytes that a rank holds between steps, from the table and the shapes.

``held`` counts the flat pieces, padding included; ``formula`` is the textbook count without padding, for any number
of parameters: the memory side of ZeRO's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.table.cells import DENSE, ITEMSIZE, Cell, StateAxes, Strategy
from plait.table.flat import FlatLayout, UnitLayout
from plait.table.mesh import Mesh


@dataclass(frozen=True)
class Held:
    """Bytes per rank between steps, by kind of state."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer

    def plus(self, other: Held) -> Held:
        return Held(self.params + other.params, self.grads + other.grads, self.optimizer + other.optimizer)


def held(units: Sequence[UnitLayout], mesh: Mesh, strategy: Strategy, rank: int, states: int = 2) -> Held:
    """Counts the bytes of one rank, exactly.  ``states`` is the number of values of a parameter's size that the
    optimizer keeps (Adam 2, SGD 0, with momentum 1), without a row's master weights."""

    def bounds(flat: FlatLayout, axes: StateAxes, cell: Cell) -> tuple[int, int]:
        split = axes.of(cell.split)
        return flat.piece(mesh.count(split), mesh.index(rank, split))

    def piece(flat: FlatLayout, axes: StateAxes, cell: Cell) -> int:
        start, stop = bounds(flat, axes, cell)
        return (stop - start) * flat.itemsize_in(cell)

    flats = [(f, unit.axes, t) for unit in units for f, t in zip(unit.flats, unit.trainable, strict=True)]
    trained, optim = [(f, axes) for f, axes, trains in flats if trains], strategy.optim
    updated = [run.numel * f.itemsize_in(optim) for f, axes in trained for run in f.runs(*bounds(f, axes, optim))]
    masters = [piece(f, axes, optim) for f, axes in trained if f.has_master(strategy)]
    return Held(
        params=sum(piece(f, axes, strategy.params) for f, axes, _ in flats),
        grads=sum(piece(f, axes, strategy.grads) for f, axes in trained),
        optimizer=states * sum(updated) + sum(masters),
    )


def formula(
    num_parameters: float,
    mesh: Mesh,
    strategy: Strategy,
    axes: StateAxes = DENSE,
    /,
    *,
    param_bytes: float = 4,
    grad_bytes: float = 4,
    optimizer_bytes: float = 8,
) -> Held:
    """Returns the textbook count: each kind of state divided by the ranks that split its cell.  ``axes`` are the axes
    over which these parameters are kept.

    In 16-bit training with fp32 Adam and master weights the bytes are 2, 2 and 12.
    Source: ZeRO (Rajbhandari et al. 2020), table 1.
    """
    sizes = ((strategy.params, param_bytes), (strategy.grads, grad_bytes), (strategy.optim, optimizer_bytes))
    return Held(*(round(num_parameters * size / mesh.count(axes.of(cell.split))) for cell, size in sizes))


def state_bytes(row: Strategy, dtype: str, states: int = 2) -> dict[str, int]:
    """Returns the bytes of a parameter, its gradient, and the optimizer's state (with any master weight) on the device;
    ``dtype`` is that of the computation."""
    own, wide = row.params.itemsize(ITEMSIZE[dtype]), row.optim.itemsize(ITEMSIZE[dtype])
    optimizer = 0 if row.optim.device else states * wide + (wide if wide > own else 0)
    return {"param_bytes": own, "grad_bytes": row.grads.itemsize(ITEMSIZE[dtype]), "optimizer_bytes": optimizer}
