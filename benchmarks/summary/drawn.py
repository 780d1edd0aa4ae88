"""The numbers of each picture, without drawing them, and their mark, which shows whether a picture is stale."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from summary.records import Record
from summary.verdicts import verdict

SIZE = re.compile(r"(\w+) (\d+) ([KM])B, (\d+) ranks")
GLOO = "gloo"


class Dot(NamedTuple):
    """A goal: how far a ratio is from it; 1 is the goal, more is better."""

    suite: str
    label: str
    median: float
    low: float
    high: float


class Curve(NamedTuple):
    """Times faster than gloo over bytes: (bytes, median, low, high)."""

    ranks: int
    label: str
    points: tuple[tuple[int, float, float, float], ...]


def dots(record: Record) -> list[Dot]:
    """Every goal of a record; of a value that is to be small, goal over value."""
    found = []
    for row in record.rows:
        if row.goal is None or verdict(row) is None:
            continue
        against = f" / {row.peer}" if row.peer else ""
        label = f"{row.work}: {row.contestant}{against}"
        if row.ratio is not None:
            low, median, high = (value / row.goal for value in (row.ratio.low, row.ratio.median, row.ratio.high))
        elif row.value.low > 0:
            low, median, high = (row.goal / value for value in (row.value.high, row.value.median, row.value.low))
        else:
            continue  # nothing, or less than a plain loop: no place on an axis of factors
        if low > 0:
            found.append(Dot(row.suite, label, median, low, high))
    return found


def curves(record: Record) -> list[Curve]:
    """plait's collectives against gloo."""
    points: dict[tuple[int, str], list[tuple[int, float, float, float]]] = {}
    for row in record.rows:
        match = SIZE.fullmatch(row.work) if row.suite == "collectives" and row.peer == GLOO else None
        if match is None or row.ratio is None:
            continue
        size = int(match[2]) * (2**20 if match[3] == "M" else 2**10)
        spread = row.ratio
        points.setdefault((int(match[4]), f"{match[1]}, {row.contestant}"), []).append(
            (size, spread.median, spread.low, spread.high)
        )
    return [Curve(ranks, label, tuple(sorted(found))) for (ranks, label), found in points.items()]


def digest(name: str, records: Sequence[Record]) -> str:
    """The mark of the numbers that a picture shows, with the days they are of."""
    shown = {"benchmarks-goals.svg": dots, "benchmarks-collectives.svg": curves}[name]
    text = json.dumps([(record.date, shown(record)) for record in records])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
