"""Finds gradients that are not finite before they are reduced: a sum no longer shows which rank they came from.

Each unit's gradient becomes one number, its square, while it is still in the cache; no rank waits for it before the
step's report.  A gradient of more than 1e19 (fp32) counts as not finite, since its square is not.
"""

import math

import torch
from torch import Tensor

from plait.torch_private import foreach_norm

_DOT = (torch.float32, torch.float64)


class GradientWatch:
    """The gradients of this rank's units in one step, as they come, each as one number."""

    def __init__(self) -> None:
        self._squares: list[Tensor] = []
        self._places: list[tuple[int, str]] = []

    def look(self, gradients: list[Tensor], microbatch: int, name: str) -> None:
        """Takes a unit's whole gradient, flat or by parameter; ``name`` is that of its first parameter."""
        wide = all(gradient.dtype in _DOT for gradient in gradients)
        if len(gradients) > 1:
            norms = foreach_norm(gradients, 2, dtype=None if wide else torch.float32)
            self._squares.append(torch.stack(norms).sum())
        elif wide and gradients[0].numel() < 2**31:  # longer ones cuBLAS refuses
            self._squares.append(torch.dot(gradients[0].view(-1), gradients[0].view(-1)))
        else:
            self._squares.append(gradients[0].abs().sum(dtype=torch.float32))
        self._places.append((microbatch, name))

    def first(self) -> tuple[int, str] | None:
        """Microbatch and name of the first that was not finite; waits for the device once, and forgets them all."""
        squares, places = self._squares, self._places
        self._squares, self._places = [], []
        if not squares or math.isfinite((row := torch.stack(squares)).sum().item()):
            return None
        return next((place for place, finite in zip(places, row.isfinite().tolist(), strict=True) if not finite), None)
