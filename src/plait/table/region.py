"""Boxes of a tensor in global coordinates, and the parts of a cut dim."""

from __future__ import annotations

import math
from collections.abc import Iterator

Region = tuple[tuple[int, int], ...]
"""A box of a tensor in global coordinates: start and stop in each dim."""


def part(size: int, ways: int, index: int) -> tuple[int, int]:
    """The start and stop of part ``index`` of ``size`` elements in ``ways``: 5 in 4 is 2, 2, 1, 0, as in DTensor."""
    step = -(-size // ways)
    return min(index * step, size), min((index + 1) * step, size)


def extent(region: Region) -> tuple[int, ...]:
    """Returns the elements of a box per dim."""
    return tuple(stop - start for start, stop in region)


def overlap(one: Region, other: Region) -> Region | None:
    """Returns the box that two boxes share; None if they share no element."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def inside(region: Region, whole: Region) -> Region:
    """Returns a box in the coordinates of another one, which contains it."""
    return tuple((a - origin, b - origin) for (a, b), (origin, _) in zip(region, whole, strict=True))


def blocks(region: Region, most: int) -> Iterator[Region]:
    """Splits a box into boxes of at most ``most`` elements; end to end, their elements keep its order."""
    sizes = extent(region)
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None or math.prod(sizes) <= most:
        yield region
        return
    start, stop = region[dim]
    rows = max(1, most // math.prod(sizes[dim + 1 :]))
    for first in range(start, stop, rows):
        yield from blocks((*region[:dim], (first, min(stop, first + rows)), *region[dim + 1 :]), most)
