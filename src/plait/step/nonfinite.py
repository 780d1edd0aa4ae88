"""Finds the rank whose loss or gradient is not finite: all ranks learn it from the step's report, before the update.

a unit's gradient                 ──► one number, before it is reduced (``zero.gradient_watch``)
the report                        ──► each rank's first place with inf or NaN, and its losses
every rank                        ──► raises, or skips the step; both name the rank
"""

import math
from collections.abc import Sequence
from typing import Literal

from plait.step.exchange import Exchange, Report
from plait.zero.gradient_watch import SUM

NonFinite = Literal["raise", "skip"]
"""The engine's choice for a step with a loss or gradient that is not finite."""

NAMED = 4
"""The most places that an error names."""


def encoded(place: tuple[int, str], names: Sequence[str]) -> int:
    """Encodes a place as one number of the report; 0 means no place."""
    return 1 + (place[0] - SUM) * len(names) + names.index(place[1])


def described(losses: Sequence[tuple[int, Sequence[float]]], places: Sequence[float], names: Sequence[str]) -> str:
    """Says which losses (of a rank's microbatches) and gradients (each rank's place as ``encoded`` with these names)
    are not finite, and where; "" if all are finite."""
    reasons = [
        f"the loss of microbatch {m} on rank {rank} is {loss}"
        for rank, of_rank in losses
        for m, loss in enumerate(of_rank)
        if not math.isfinite(loss)
    ]
    for rank, place in enumerate(places):
        if place:
            number, index = divmod(int(place) - 1, len(names))
            where = f"in microbatch {number + SUM}" if number + SUM != SUM else "accumulated over the microbatches"
            reasons.append(f"a gradient in the unit of {names[index]!r} {where} on rank {rank}")
    more = f", and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
    return "; ".join(reasons[:NAMED]) + more


def not_finite(step: int, report: Report, exchange: Exchange) -> FloatingPointError:
    """Returns the error for a step with this report."""
    first = exchange.losses_at * exchange.in_stage
    ranks = range(first, first + exchange.in_stage, exchange.tensor)  # the ranks of the losses, by data rank
    losses = list(zip(ranks, report.losses, strict=True))
    problem = described(losses, [row[0] for row in report.marks], exchange.names)
    return FloatingPointError(
        f"step {step} (counted from 0) is not finite: {problem or 'the sum of the gradients over the ranks'}; "
        f"no parameter was changed. Look at these samples, lower the learning rate, clip, or leave such steps "
        f'out with nonfinite="skip"'
    )
