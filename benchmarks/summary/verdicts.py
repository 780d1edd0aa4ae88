"""A row and its goal: met or missed by the median, and whether the goal is inside the range of the rounds."""

from __future__ import annotations

from typing import Literal, NamedTuple

from harness.rows import Row

BUSY = 1.5
"""Load per core before a suite from which on other programs took part."""


class Verdict(NamedTuple):
    """``open``: the lowest and the highest round are on two sides of the goal, so another run may differ."""

    word: Literal["met", "missed"]
    open: bool

    def __str__(self) -> str:
        return f"{self.word}, ranges overlap" if self.open else self.word


def verdict(row: Row) -> Verdict | None:
    """None where nothing was wanted.  A ratio is to be the goal at least, a value at most."""
    if row.goal is None:
        return None
    spread, sign = (row.value, -1.0) if row.ratio is None else (row.ratio, 1.0)
    sides = {sign * value >= sign * row.goal for value in (spread.low, spread.high)}
    return Verdict("met" if sign * spread.median >= sign * row.goal else "missed", len(sides) == 2)
