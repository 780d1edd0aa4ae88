"""Values of a flat buffer by intervals of its elements: (start, stop, value), in order, no two overlapping.

[(0, 64, 7), (96, 128, 7)]      elements 0..63 and 96..127 have value 7; 64..95 were never written
"""

from collections.abc import Sequence

Pieces = list[tuple[int, int, int | None]]
"""A value is a number; None, like a gap, is memory with unknown content."""


def cut(pieces: Sequence[tuple[int, int, int | None]], start: int, stop: int) -> Pieces:
    """The pieces in an interval, gaps left out."""
    if len(pieces) == 1:  # the usual case
        a, b, value = pieces[0]
        a, b = max(a, start), min(b, stop)
        return [(a, b, value)] if a < b else []
    return [(max(a, start), min(b, stop), v) for a, b, v in pieces if a < stop and start < b]


def write(pieces: Sequence[tuple[int, int, int | None]], start: int, stop: int, values: Pieces) -> Pieces:
    """The same buffer, with an interval replaced by ``values``, which are inside it."""
    if start >= stop:
        return list(pieces)
    kept = [(a, min(b, start), v) for a, b, v in pieces if a < start]
    after = [(max(a, stop), b, v) for a, b, v in pieces if b > stop]
    return joined([*kept, *values, *after])


def joined(pieces: Sequence[tuple[int, int, int | None]]) -> Pieces:
    """Neighbours of one value as one interval; unknown values are left out."""
    found: Pieces = []
    for a, b, value in pieces:
        if value is None or a >= b:
            continue
        if found and found[-1][1] == a and found[-1][2] == value:
            found[-1] = (found[-1][0], b, value)
        else:
            found.append((a, b, value))
    return found


def lacking(pieces: Sequence[tuple[int, int, int | None]], start: int, stop: int, value: int) -> int:
    """The first element of an interval that does not have this value; -1 where all have it."""
    at = start
    for a, b, found in cut(pieces, start, stop):
        if a > at or found != value:
            return at if a > at else a
        at = b
    return at if at < stop else -1


def value_at(pieces: Sequence[tuple[int, int, int | None]], element: int) -> int | None:
    """The value of one element."""
    return next((v for a, b, v in pieces if a <= element < b), None)


def breaks(buffers: Sequence[Pieces], start: int, stop: int) -> list[int]:
    """The elements at which any of some buffers changes its value inside an interval, with the ends of the interval."""
    inner = {edge for pieces in buffers for a, b, _ in pieces for edge in (a, b) if start < edge < stop}
    return [start, *sorted(inner), stop]
