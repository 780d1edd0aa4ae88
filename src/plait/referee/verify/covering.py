"""A small set of cases in which every two values meet.

    dimensions        a: 1 2        b: 1 2        c: 1 2            8 combinations

    covering set      a b c
                      1 1 1         every pair of values of two dimensions is in one of the rows:
                      1 2 2         a fault that needs two settings shows in 4 cases instead of 8,
                      2 1 2         and with fourteen dimensions in a hundred instead of millions
                      2 2 1

Not all values combine: rules, each over some of the dimensions, say which do, and a pair that no row can have is left
out.  The set is built row by row: take a pair that is not covered yet, then give each other dimension the value that
covers most, and backtrack if a rule leaves no choice.

Source: the greedy construction of AETG (Cohen et al. 1997), with rules instead of lists of forbidden tuples.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeAlias

Row: TypeAlias = dict[str, Hashable]  # one value for each dimension
Pair: TypeAlias = tuple[str, Hashable, str, Hashable]  # two dimensions, in their order, and a value of each


@dataclass(frozen=True)
class Rule:
    """A condition on the values of some dimensions; ``holds`` takes them in the order of ``over``."""

    over: tuple[str, ...]
    holds: Callable[..., bool]


def covering(dimensions: Mapping[str, Sequence[Hashable]], rules: Sequence[Rule] = ()) -> list[Row]:
    """Returns rows that obey the rules and have every possible pair of values; the same rows for the same input.

    If several values cover equally many pairs, it takes the one in fewest rows, then the first.  Raises ValueError if
    the rules allow no row.
    """
    place = {name: place for place, name in enumerate(dimensions)}
    left: dict[Pair, None] = {}
    used: Counter[tuple[str, Hashable]] = Counter()

    def covers(row: Row, name: str, value: Hashable) -> int:
        met = ((a, row[a], name, value) if place[a] < place[name] else (name, value, a, row[a]) for a in row)
        return sum(pair in left for pair in met)

    def completed(row: Row) -> Row | None:
        """The row with all dimensions, or None if the rules allow no such row."""
        if any(set(rule.over) <= row.keys() and not rule.holds(*map(row.get, rule.over)) for rule in rules):
            return None
        if (name := next((name for name in dimensions if name not in row), None)) is None:
            return {name: row[name] for name in dimensions}
        for value in sorted(dimensions[name], key=lambda value: (-covers(row, name, value), used[name, value])):
            if longer := completed({**row, name: value}):
                return longer
        return None

    if completed({}) is None:
        raise ValueError("the rules allow no row at all: drop one of them, or give more values")
    left = {
        (a, u, b, v): None
        for a, b in combinations(dimensions, 2)
        for u, v in product(dimensions[a], dimensions[b])
        if completed({a: u, b: v})
    }
    rows = []
    while left:
        a, u, b, v = next(iter(left))
        row = completed({a: u, b: v})
        assert row is not None
        rows.append(row)
        used.update(row.items())
        for pair in pairs(row):
            left.pop(pair, None)
    return rows


def pairs(row: Mapping[str, Hashable]) -> list[Pair]:
    """All pairs of a row's dimensions, with their values."""
    return [(a, row[a], b, row[b]) for a, b in combinations(row, 2)]
