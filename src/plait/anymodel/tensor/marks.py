"""Which dims of an activation are cut over the tensor axis, and how that comes through a change of its shape.

A dim is made of *factors*, the outermost first, as one that a view has merged is:

    h    [2, 5, 24]      plain 2, plain 5, (24 of 48 features)       what a column left on one of two ranks
    view [2, 5, 6, 4]    ...  (6 of 12 groups of 4), plain 4         whole heads: the cut goes to the outer dim
    flat [10, 24]        (plain 2, plain 5), (24 of 48 features)

A fused product is cut in several *parts*, end to end on each rank; a view with one entry for each part leaves the cut
inside.  Where a new shape cannot be told from the factors nothing is known of the result (None).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple


@dataclass(frozen=True)
class Cut:
    """Of which every rank has another part."""

    name: str
    """The module that left it so."""
    whole: int
    """How many there are on all ranks together."""
    parts: tuple[int, ...]
    """How many of each part of a fused product are here."""
    grain: int = 1
    """How many belong together: the features of a head."""
    unit: str = "features"
    """What they are; ``STEPS`` under sequence parallelism."""

    def grouped(self, size: int) -> "Cut":
        """In groups of this many."""
        unit = self.unit if size == 1 else f"groups of {size} {self.unit}"
        parts = tuple(part // size for part in self.parts)
        return replace(self, whole=self.whole // size, parts=parts, grain=max(1, self.grain // size), unit=unit)


STEPS = "steps of time"


@dataclass(frozen=True)
class Counted:
    """Positions that a rank has counted from 0."""


COUNTED = Counted()


class Factor(NamedTuple):
    """Of the size of a dim."""

    size: int
    mark: Cut | Counted | None = None


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


def plain(shape: Sequence[int]) -> Dims:
    """Nothing is cut."""
    return tuple((Factor(size),) for size in shape)


def marked(dims: Dims) -> bool:
    return any(factor.mark is not None for dim in dims for factor in dim)


def cut_of(dim: Dim) -> Cut | None:
    return next((factor.mark for factor in dim if isinstance(factor.mark, Cut)), None)


def is_counted(dim: Dim) -> bool:
    return any(factor.mark is COUNTED for factor in dim)


def size_of(dim: Dim) -> int:
    return prod(factor.size for factor in dim)


def runs(dim: Dim) -> tuple[int, ...] | None:
    """The lengths of the runs of the whole that a cut dim has on this rank; None where they are not end to end."""
    factors = [factor for factor in dim if factor.size != 1 or factor.mark is not None]
    if not factors or not isinstance(factors[0].mark, Cut) or any(factor.mark is not None for factor in factors[1:]):
        return None
    inner = prod(factor.size for factor in factors[1:])
    return tuple(part * inner for part in factors[0].mark.parts)


def between(dim: Dim, start: int, stop: int) -> Dim | None:
    """What lies between two places of a dim; None where that is no whole part of what is cut."""
    if (start, stop) == (0, size_of(dim)):
        return dim
    cut = cut_of(dim)
    if cut is None:
        return (Factor(max(0, stop - start), COUNTED if is_counted(dim) else None),)
    if len(dim) > 1:
        return None
    places = [sum(cut.parts[:n]) for n in range(len(cut.parts) + 1)]
    if start not in places or stop not in places or start >= stop:
        return None
    parts = cut.parts[places.index(start) : places.index(stop)]
    whole = cut.whole * sum(parts) // sum(cut.parts)
    return (Factor(stop - start, replace(cut, parts=parts, whole=whole)),)


def joined(dims: Sequence[Dim]) -> Dim | None:
    """Dims end to end; None where some are cut and others are not."""
    cuts = [cut_of(dim) for dim in dims]
    size = sum(map(size_of, dims))
    if not any(cuts):
        return (Factor(size, COUNTED if any(map(is_counted, dims)) else None),)
    known = [cut for cut, dim in zip(cuts, dims, strict=True) if cut is not None and len(dim) == 1]
    if len(known) < len(dims):
        return None
    parts = tuple(part for cut in known for part in cut.parts)
    grain = min(cut.grain for cut in known)
    return (Factor(size, replace(known[0], parts=parts, whole=sum(cut.whole for cut in known), grain=grain)),)


def regrouped(dims: Dims, shape: Sequence[int], open_at: int | None = None) -> Dims | None:
    """The dims of a view of this shape; ``open_at``: which of its sizes the view has worked out.

    Dims at either end that keep their sizes stay what they are, those of size 1 too; of what is cut at the end, a 1
    before it may be this rank's one group.
    """
    if 0 in shape:
        return None
    sizes = [size_of(dim) for dim in dims]
    least = min(len(sizes), len(shape))
    first = next((i for i in range(least) if sizes[i] != shape[i]), least)
    kept = [size if all(f.mark is None for f in dim) else -1 for size, dim in zip(sizes, dims, strict=True)]
    last = next((i for i in range(least - first) if kept[-1 - i] != shape[-1 - i]), least - first)
    within = shape[first : len(shape) - last]
    at = None if open_at is None or not 0 <= open_at - first < len(within) else open_at - first
    middle = _regrouped(dims[first : len(dims) - last], within, at)
    return None if middle is None else (*dims[:first], *middle, *dims[len(dims) - last :])


def _regrouped(dims: Dims, shape: Sequence[int], open_at: int | None) -> Dims | None:
    left = [factor for dim in dims for factor in dim if factor.size != 1 or factor.mark is not None]
    left.reverse()
    found: list[Dim] = []
    for place, size in enumerate(shape):
        dim: list[Factor] = []
        if left and left[-1].size == 1:
            dim.append(left.pop())
        elif left and size == 1 and isinstance(cut := left[-1].mark, Cut):  # a rank with one head, perhaps
            if place != open_at and cut.grain != left[-1].size:
                return None
            halves = _split(left.pop(), 1)
            if halves is None:
                return None
            dim.append(halves[0])
            left.append(halves[1])
        while size > 1:
            factor = left.pop()
            if factor.size > size:
                halves = _split(factor, size)
                if halves is None:
                    return None
                factor, inner = halves
                left.append(inner)
            if size % factor.size:
                return None
            dim.append(factor)
            size //= factor.size
        found.append(tuple(dim) or (Factor(1),))
    return tuple(found)


def _split(factor: Factor, outer: int) -> tuple[Factor, Factor] | None:
    """A factor as two, the first of this size."""
    inner, rest = divmod(factor.size, outer)
    if rest:
        return None
    cut = factor.mark
    if not isinstance(cut, Cut):
        return Factor(outer, cut), Factor(inner, cut)
    if len(cut.parts) == outer > 1 and len(set(cut.parts)) == 1:
        one = replace(cut, parts=(inner,), whole=cut.whole // outer)
        return Factor(outer), Factor(inner, one)
    if any(part % inner for part in cut.parts) or (cut.grain % inner and inner % cut.grain):
        return None
    return Factor(outer, cut.grouped(inner)), Factor(inner)
