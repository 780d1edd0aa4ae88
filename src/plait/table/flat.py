"""A unit's parameters laid end to end in one flat buffer, and its cut by the data axes.

    parameter    w (5 x 7)             gap        b (7)      padding
    elements     0 ............ 34     35 .. 47   48 .. 54   55 .. 63
    pieces       └─ piece 0: 0..31 ─┘└───── piece 1: 32..63 ────────┘

Gathers and reductions then run on contiguous memory, straight into place.  Every parameter starts at a 64-byte boundary
and at a multiple of 16 elements, and an element cut falls on such a multiple, anywhere in the buffer: vectorised
kernels round their tails differently from their bodies, so a cut anywhere else would change bits.

``cut="tensor"`` puts the boundaries between parameters instead, so that one rank owns each of them whole
(ZeroRedundancyOptimizer, the layer-owner ZeRO-3, optimizers that need matrices).  The pieces are then uneven: a gather
becomes one broadcast per owner, a reduce-scatter one reduce (see ``lower``).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from plait.table.cells import DENSE, Cell, Move, StateAxes, Strategy
from plait.table.mesh import Mesh
from plait.table.region import Region

GRAIN = 16
"""Cuts fall on multiples of this many elements."""

BOUNDARY_BYTES = 64
"""Parameters start on multiples of this many bytes (one cache line, one AVX-512 register)."""

BUCKET_BYTES = 2**20
"""The most bytes of small neighbouring units that share one buffer if nothing is gathered."""

LEAST_BYTES = 2**12
"""The least bytes that a parameter counts for in a bucket, so that a bucket has a few hundred parameters at most."""

Cut = Literal["element", "tensor"]


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Run:
    """The elements ``start..stop`` of one parameter, at ``offset`` of a piece."""

    slot: Slot
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.numel == self.slot.numel

    def regions(self) -> tuple[Region, ...]:
        """The run as regions of the parameter, in order."""
        return regions(self.slot.shape, self.start, self.stop)


def regions(shape: tuple[int, ...], start: int, stop: int) -> tuple[Region, ...]:
    """The elements ``start..stop`` of a tensor, row after row, as the fewest regions in this order.

    2..9 of a 3 x 4:   . . 2 3  |  4 5 6 7  |  8 . . .
    """
    if start >= stop:
        return ()
    if len(shape) < 2:
        return (((start, stop),),) if shape else ((),)
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row

    def inside(of_row: int) -> list[Region]:
        low, high = max(start - of_row * row, 0), min(stop - of_row * row, row)
        return [((of_row, of_row + 1), *rest) for rest in regions(shape[1:], low, high)]

    if first > last:  # in the middle of a row
        return tuple(inside(last))
    found = inside(first - 1) if start < first * row else []
    if first < last:
        found.append(((first, last), *((0, size) for size in shape[1:])))
    return (*found, *(inside(last) if last * row < stop else ()))


@dataclass(frozen=True)
class FlatLayout:
    """One flat buffer: its slots and the boundaries of its finest pieces (``bounds[k]..bounds[k+1]``)."""

    slots: tuple[Slot, ...]
    itemsize: int
    bounds: tuple[int, ...]
    real: bool = True
    """True if its elements are real floating-point numbers, whose dtype a cell may change."""

    @property
    def numel(self) -> int:
        """The number of elements of the whole buffer, padding included."""
        return self.bounds[-1]

    def itemsize_in(self, cell: Cell) -> int:
        """The bytes of an element in the dtype of a cell."""
        return cell.itemsize(self.itemsize) if self.real else self.itemsize

    def has_master(self, strategy: Strategy) -> bool:
        """True if the optimizer updates a separate copy: its cell has a device, or not the parameters' dtype."""
        return bool(strategy.optim.device) or self.itemsize_in(strategy.optim) != self.itemsize_in(strategy.params)

    @property
    def num_pieces(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def even(self) -> bool:
        """True if all pieces have the same size, so that one collective moves them all."""
        return len({b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)}) <= 1

    def piece(self, count: int, index: int) -> tuple[int, int]:
        """Returns the elements of piece ``index`` if the buffer is cut into ``count`` (a divisor of the finest cut)."""
        step, rest = divmod(self.num_pieces, count)
        if rest or not 0 <= index < count:
            raise ValueError(f"no piece {index} of {count} in a layout of {self.num_pieces} pieces")
        return self.bounds[index * step], self.bounds[(index + 1) * step]

    def runs(self, start: int, stop: int) -> tuple[Run, ...]:
        """Returns the runs within the elements ``start..stop``, one per parameter that has any there."""
        found = (self.run(index, start, stop) for index in range(len(self.slots)))
        return tuple(run for run in found if run is not None)

    def run(self, index: int, start: int, stop: int) -> Run | None:
        """Returns the part of a parameter that falls within the elements ``start..stop``; None if there is none."""
        slot = self.slots[index]
        low, high = max(slot.offset, start), min(slot.end, stop)
        return Run(slot, low - slot.offset, high - slot.offset, low - start) if low < high else None


def buckets(units: Sequence[Iterable[tuple[int, int]]], most: int = BUCKET_BYTES) -> list[range]:
    """Groups neighbouring units of at most ``most`` bytes together; a larger unit is a group by itself.

    If nothing is gathered, a group has one flat buffer, so many small messages become one.

    Args:
        units: for each unit, the elements, and bytes per element, of each of its parameters.
    """
    sizes = [sum(max(numel * itemsize, LEAST_BYTES) for numel, itemsize in unit) for unit in units]
    runs: list[range] = []
    together = 0
    for number, size in enumerate(sizes):
        together += size
        if runs and together <= most:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
            together = size
    return runs


def lay(
    parameters: Iterable[tuple[str, tuple[int, ...]]],
    itemsize: int,
    num_pieces: int,
    cut: Cut = "element",
    loads: Sequence[int] | None = None,
    *,
    real: bool = True,
    like: FlatLayout | None = None,
) -> FlatLayout:
    """Lays parameters, given by name and shape, end to end and cuts the buffer.

    Args:
        itemsize: bytes per element.
        num_pieces: the finest cut of any cell of the row.
        cut: where boundaries may fall.
        loads: bytes that each piece's owner already has (tensor cuts only): the largest is made as small as possible.
        real: True if a cell's dtype applies to the parameters.
        like: the layout of other pieces of the same parameters, on the first rank of a tensor axis; each parameter has
            the same owner here (tensor cuts only).
    """
    align = max(GRAIN, BOUNDARY_BYTES // itemsize)
    slots = []
    end = 0
    for name, shape in parameters:
        slots.append(Slot(name, shape, end))
        end += -(-math.prod(shape) // align) * align
    if cut == "tensor":
        starts = [*(slot.offset for slot in slots), end]
        if like is None:
            bounds = _balance(starts, [b / itemsize for b in loads or [0] * num_pieces])
        else:
            there = [*(slot.offset for slot in like.slots), like.numel]
            bounds = tuple(starts[there.index(place)] for place in like.bounds)
        return FlatLayout(tuple(slots), itemsize, bounds, real)
    size = -(-end // (align * num_pieces)) * align
    return FlatLayout(tuple(slots), itemsize, tuple(k * size for k in range(num_pieces + 1)), real)


def _balance(starts: Sequence[int], loads: Sequence[float]) -> tuple[int, ...]:
    """Returns boundaries, each one of ``starts``, that keep the largest ``load + piece`` as small as possible.

    ``best[s]`` is the smallest possible maximum when the pieces so far have everything before ``starts[s]``.
    """
    best = [0 if s == 0 else math.inf for s in range(len(starts))]
    choices: list[list[int]] = []
    for load in loads:
        row, choice = [], []
        for s in range(len(starts)):
            costs = [max(best[t], load + starts[s] - starts[t] if t < s else 0) for t in range(s + 1)]
            t = min(range(s + 1), key=costs.__getitem__)
            row.append(costs[t])
            choice.append(t)
        best = row
        choices.append(choice)
    bounds, s = [starts[-1]], len(starts) - 1
    for choice in reversed(choices):
        s = choice[s]
        bounds.append(starts[s])
    return tuple(reversed(bounds))


@dataclass(frozen=True)
class Message:
    """A collective on the elements ``start..stop`` of a flat buffer; ``root`` is an index in the group, or -1."""

    kind: str
    axes: tuple[str, ...]
    start: int
    stop: int
    root: int = -1

    @property
    def numel(self) -> int:
        return self.stop - self.start


def lower(step: Move, layout: FlatLayout, mesh: Mesh, rank: int) -> tuple[Message, ...]:
    """Returns the messages that carry out one move for this rank, in the order in which all ranks send them.

    Even pieces travel in one collective, uneven ones by one broadcast or reduce per owner.  Groups of one rank and
    slices send nothing.
    """
    outer, ways = mesh.count(step.outer), mesh.count(step.axes)
    start, stop = layout.piece(outer, mesh.index(rank, step.outer))
    if step.kind == "slice" or ways == 1 or start == stop:
        return ()
    if step.kind == "all_reduce" or layout.even:
        return (Message(step.kind, step.axes, start, stop),)
    kind = {"all_gather": "broadcast", "reduce_scatter": "reduce"}[step.kind]
    first = mesh.index(rank, step.outer) * ways
    pieces = [layout.piece(outer * ways, first + k) for k in range(ways)]
    return tuple(Message(kind, step.axes, a, b, k) for k, (a, b) in enumerate(pieces) if a < b)


@dataclass(frozen=True)
class UnitLayout:
    """A group of parameters that is gathered and reduced together, as the planner sees it: its flat buffers, and for
    each of them True if it trains."""

    name: str
    flats: tuple[FlatLayout, ...]
    trainable: tuple[bool, ...]
    uses: tuple[bool, ...] = (True,)
    """The gathers of one forward pass, in order: the unit's own, and those of other units that read one of its (tied)
    parameters.  True if a backward passes through the reader, False in frozen layers before which nothing trains."""
    summed: tuple[bool, ...] = ()
    """True for each flat whose gradients are pending over the tensor axis; empty if none is."""
    own: int = 0
    """The index in ``uses`` of the unit's own use, or of the use by an enclosing unit, which leaves it open."""
    last_open: int = 0
    """The index of the last use that stays open to the end of a backward."""
    reduced: bool = True
    """True if a microbatch's gradients are reduced; False for a split unit that gets none."""
    axes: StateAxes = DENSE
    """The axes over which its state is split."""

    @property
    def differentiated(self) -> bool:
        """True if a backward passes through the unit."""
        return any(self.uses)

    @property
    def unkept(self) -> int:
        """The number of leading uses without a backward, which keep nothing for the next."""
        return self.uses.index(True) if self.differentiated else 0

    def backward_uses(self, *, open_still: bool) -> int:
        """Returns the number of gathers of one backward pass.

        Uses that ran before a use that stays open find the unit open.  With ``open_still`` a unit that trains also
        waits for its last gradient.
        """
        waits = open_still and any(self.trainable) and self.uses[self.own]
        return sum(self.uses[max(self.last_open, self.own if waits else 0) :])
