"""Finds gradients that are not finite before they are reduced: a sum no longer shows which rank they came from.

Each unit's gradient becomes one number, its square, while it is still in the cache; no rank waits for it before the
step's report.  A gradient of more than 1e19 (fp32) counts as not finite, since its square is not.
"""

import math

import torch
from torch import Tensor

_DOT = (torch.float32, torch.float64)


class GradientWatch:
    """The gradients of this rank's units in one step, as they come, each as one number."""

    def __init__(self) -> None:
        self._squares: list[Tensor] = []
        self._places: list[tuple[int, str]] = []

    def look(self, gradient: Tensor, microbatch: int, name: str) -> None:
        """Takes a unit's whole flat gradient; ``name`` is that of its first parameter."""
        wide = gradient.dtype in _DOT and gradient.numel() < 2**31  # longer ones cuBLAS refuses
        self._squares.append(torch.dot(gradient, gradient) if wide else gradient.abs().sum(dtype=torch.float32))
        self._places.append((microbatch, name))

    def first(self) -> tuple[int, str] | None:
        """Microbatch and name of the first that was not finite; waits for the device once, and forgets them all."""
        squares, places = self._squares, self._places
        self._squares, self._places = [], []
        if not squares or math.isfinite((row := torch.stack(squares)).sum().item()):
            return None
        return next((place for place, finite in zip(places, row.isfinite().tolist(), strict=True) if not finite), None)
