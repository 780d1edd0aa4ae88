"""A measurement as a row of a results file: the work, the peer, the ratio, and the goal.

    Row("tensor", "mlp16, 2 ranks", "plait", "torch-blocks", Spread(1.4, 1.2, 1.5), Spread(90, 88, 95), "ms", 1.2)

A row with a peer has a ratio, peer's value / contestant's: 2 is twice as fast, or half of the memory, and the goal is
the least ratio that meets it.  A row without a peer has only its value, and its goal is the largest that meets it.
Every suite writes its rows under the key ``rows`` of its ``--json``; ``benchmarks/main.py`` collects them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.report import Match, best_peer
from harness.turns import Spread, ratios


@dataclass(frozen=True)
class Row:
    """One line; ``suite`` and ``work`` name the measurement, ``work`` with the number of ranks."""

    suite: str
    work: str
    contestant: str
    peer: str | None
    """A name, or words for the group of which the fastest was met."""
    ratio: Spread | None
    """Peer's value / contestant's, formed inside a round: the median over rounds, the lowest, the highest."""
    value: Spread
    """The contestant's, over rounds."""
    unit: str
    goal: float | None = None
    chosen: str = ""
    """The real name of a described ``contestant`` or ``peer`` in this measurement."""


def value_row(
    suite: str, work: str, contestant: str, values: Sequence[float], unit: str, goal: float | None = None
) -> Row:
    """A contestant by itself."""
    return Row(suite, work, contestant, None, None, Spread.of(values), unit, goal)


def ratio_row(
    suite: str,
    work: str,
    contestant: tuple[str, Sequence[float]],
    peer: tuple[str, Sequence[float]],
    unit: str,
    goal: float | None = None,
    chosen: str = "",
) -> Row:
    """A contestant against a peer; both have a value for each round."""
    (ours, our_values), (theirs, their_values) = contestant, peer
    spread = ratios(their_values, our_values)
    return Row(suite, work, ours, theirs, spread, Spread.of(our_values), unit, goal, chosen)


def step_rows(
    suite: str, model: str, ranks: int, seconds: dict[str, list[float]], matches: Sequence[Match]
) -> list[Row]:
    """All of a benchmark of a step: every contestant's milliseconds, then every match."""
    work = f"{model}, {ranks} ranks"
    ms = {name: [1e3 * value for value in values] for name, values in seconds.items()}
    rows = [value_row(suite, work, name, values, "ms") for name, values in ms.items()]
    found: dict[tuple[str, str], Row] = {}
    for match in matches:
        if match.row in ms and (peer := best_peer(match, seconds)) is not None:
            ours, theirs = match.title or match.row, match.against or peer
            pair = f"{match.row} / {peer}" if (ours, theirs) != (match.row, peer) else ""
            row = ratio_row(suite, work, (ours, ms[match.row]), (theirs, ms[peer]), "ms", match.goal.get(model), pair)
            found.setdefault((ours, theirs), row)
    return [*rows, *found.values()]


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]
