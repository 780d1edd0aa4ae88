"""Finds the rank whose loss or gradient is not finite: all ranks agree on it in the step's report, before the update.

a unit's gradient of a microbatch ──► one number, before it is reduced (``zero.gradient_watch``)
the report                        ──► each rank's first that is inf or NaN, with its losses
every rank                        ──► raises, or skips the step; both name the rank
"""

import math
from collections.abc import Sequence
from typing import Literal

NonFinite = Literal["raise", "skip"]
"""The engine's choice for a step with a loss or gradient that is not finite."""

NAMED = 4
"""Most places that an error names."""


def encoded(place: tuple[int, str], names: Sequence[str]) -> int:
    """A place as one number of the report, where 0 is none."""
    return 1 + place[0] * len(names) + names.index(place[1])


def described(losses: Sequence[tuple[int, Sequence[float]]], places: Sequence[float], names: Sequence[str]) -> str:
    """A text that says which losses and gradients are not finite, and where; "" if all are finite.

    Args:
        losses: of the ranks that have them: the rank, and the losses of its microbatches.
        places: by rank, as ``encoded`` with these names.
    """
    reasons = [
        f"the loss of microbatch {m} on rank {rank} is {loss}"
        for rank, of_rank in losses
        for m, loss in enumerate(of_rank)
        if not math.isfinite(loss)
    ]
    for rank, place in enumerate(places):
        if place:
            microbatch, index = divmod(int(place) - 1, len(names))
            reasons.append(f"a gradient in the unit of {names[index]!r} in microbatch {microbatch} on rank {rank}")
    more = f", and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
    return "; ".join(reasons[:NAMED]) + more
