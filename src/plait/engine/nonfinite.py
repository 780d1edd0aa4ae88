"""Numbers that are not finite: seen where they arise, agreed on in the step's report, and never in an update.

    a unit's gradient of a microbatch, whole, not reduced yet ──► dot(g, g), one number, nobody waits for it
    the report                                                ──► each rank's first that is inf or NaN, beside the losses
    every rank                                                ──► raises, or skips the step; both name who it was

After a reduction nobody could say whose NaN it was, so gradients are looked at before it: one read of memory that the
backward has just written.  A gradient of more than 1e19 (fp32) counts as not finite, since its square is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

NonFinite = Literal["raise", "skip"]
"""What to do with a step that has a loss or gradient that is not finite."""

NAMED = 4
"""So many places are named."""

_DOT = (torch.float32, torch.float64)


class GradientWatch:
    """The gradients of this rank's units in one step, as they come, each as one number."""

    def __init__(self) -> None:
        self._squares: list[Tensor] = []
        self._places: list[tuple[int, str]] = []

    def look(self, gradient: Tensor, microbatch: int, name: str) -> None:
        """A unit's flat gradient is whole; ``name`` is that of its first parameter."""
        wide = gradient.dtype in _DOT
        self._squares.append(torch.dot(gradient, gradient) if wide else gradient.abs().sum(dtype=torch.float32))
        self._places.append((microbatch, name))

    def first(self) -> tuple[int, str] | None:
        """Microbatch and name of the first that was not finite; it waits for the device once, and forgets them all."""
        squares, places = self._squares, self._places
        self._squares, self._places = [], []
        if not squares:
            return None
        groups = {s.dtype: None for s in squares}
        bad: list[int] = []
        for dtype in groups:
            where = [i for i, s in enumerate(squares) if s.dtype == dtype]
            finite = torch.stack([squares[i] for i in where]).isfinite().tolist()
            bad += [i for i, fine in zip(where, finite, strict=True) if not fine]
        return places[min(bad)] if bad else None


def encoded(place: tuple[int, str] | None, names: Sequence[str]) -> int:
    """A place as one number of the report; 0 is none."""
    return 0 if place is None else 1 + place[0] * len(names) + names.index(place[1])


def described(losses: Sequence[tuple[int, Sequence[float]]], places: Sequence[float], names: Sequence[str]) -> str:
    """What is not finite, and where; "" if everything is.

    Args:
        losses: of the ranks that have them: the rank, and the losses of its microbatches.
        places: by rank, as ``encoded``.
        names: the trainable parameters of the whole model.
    """
    found = [
        f"the loss of microbatch {m} on rank {rank} is {loss}"
        for rank, of_rank in losses
        for m, loss in enumerate(of_rank)
        if not math.isfinite(loss)
    ]
    for rank, place in enumerate(places):
        if place:
            microbatch, index = divmod(int(place) - 1, len(names))
            found.append(f"a gradient in the unit of {names[index]!r} in microbatch {microbatch} on rank {rank}")
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(found[:NAMED]) + more
