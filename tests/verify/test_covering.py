"""Covering sets against the whole product: every pair that some row may hold is covered, and no row breaks a rule."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product

import pytest

from plait.referee.verify.covering import Rule, covering, pairs


def allowed(dimensions: Mapping[str, Sequence[Hashable]], rules: Sequence[Rule]) -> list[dict[str, Hashable]]:
    """Every combination of values that keeps the rules."""
    every = (dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values()))
    return [row for row in every if all(rule.holds(*(row[name] for name in rule.over)) for rule in rules)]


def is_covering(dimensions: Mapping[str, Sequence[Hashable]], rules: Sequence[Rule]) -> None:
    rows, every = covering(dimensions, rules), allowed(dimensions, rules)
    assert all(row in every for row in rows), "a row breaks a rule"
    assert all(list(row) == list(dimensions) for row in rows)
    possible = {pair for row in every for pair in pairs(row)}
    assert {pair for row in rows for pair in pairs(row)} == possible
    assert len({tuple(row.values()) for row in rows}) == len(rows) <= len(every)
    assert covering(dimensions, rules) == rows, "the same input gives the same rows"


def never(names: tuple[str, ...], values: tuple[Hashable, ...]) -> Rule:
    """These values do not stand together."""
    return Rule(names, lambda *found: found != values)


@pytest.mark.parametrize("seed", range(60))
def test_any_rules(seed: int) -> None:
    """2 to 5 dimensions of 1 to 4 values; some pairs and triples are forbidden, so that others become impossible."""
    draw = random.Random(seed)
    dimensions = {name: tuple(range(draw.randint(1, 4))) for name in "abcde"[: draw.randint(2, 5)]}
    rules = []
    for size in (2, 3):
        for names in combinations(dimensions, size):
            for values in product(*(dimensions[name] for name in names)):
                if draw.random() < 0.15:
                    rules.append(never(names, values))
    if allowed(dimensions, rules):
        is_covering(dimensions, rules)
    else:
        with pytest.raises(ValueError, match="allow no row"):
            covering(dimensions, rules)


def test_many_dimensions_need_few_rows() -> None:
    """20 dimensions of 4 values: a million million rows, 16 at least, and the greedy way stays near it."""
    dimensions = {f"d{i}": (0, 1, 2, 3) for i in range(20)}
    rows = covering(dimensions)
    assert {pair for row in rows for pair in pairs(row)} >= {("d0", 3, "d19", 2), ("d7", 0, "d8", 0)}
    assert 16 <= len(rows) <= 45


def test_a_dimension_alone_and_none_at_all() -> None:
    assert covering({"a": (1, 2)}) == covering({}) == []
