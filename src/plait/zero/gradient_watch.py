"""Finds gradients that are not finite before they are reduced: a sum no longer shows which rank they came from.

Each unit's gradient becomes one number, a *probe*, which is finite if all elements are; no rank waits for it before the
step's report.  A probe may be a sum of squares, so an fp32 gradient above 1e19 counts as not finite.

    reduced in every microbatch      looked at before each reduction, while it is still in the cache
    accumulated over microbatches    the sum, before the step's reduction; in a microbatch only the unit whose gradient
                                     comes last, because numbers that are not finite spread towards the input
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.torch_private import foreach_norm

SUM = -1
"""The microbatch number for the sum of all microbatches."""

_DOT = (torch.float32, torch.float64)


class GradientWatch:
    """The gradients of this rank's units in one step, as they arrive, each as one number."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the last step's gradients, which ``zero_grad`` may have thrown away before they were read."""
        self.probes: list[Tensor] = []
        self._places: list[tuple[int, str]] = []

    def look(self, gradients: list[Tensor], microbatch: int, name: str) -> None:
        """Records a unit's whole gradient, flat or by parameter.  ``name`` is the name of its first parameter;
        ``microbatch`` is ``SUM`` for the sum of all microbatches."""
        if len(gradients) > 1:
            wide = all(gradient.dtype in _DOT for gradient in gradients)
            norms = foreach_norm(gradients, 2, dtype=None if wide else torch.float32)
            self.probes.append(torch.stack(norms).sum())
        elif gradients[0].dtype in _DOT and gradients[0].numel() < 2**31:  # cuBLAS refuses longer ones
            self.probes.append(torch.dot(gradients[0].view(-1), gradients[0].view(-1)))
        else:
            self.probes.append(gradients[0].abs().sum(dtype=torch.float32))
        self._places.append((microbatch, name))

    def first(self, probes: Sequence[float]) -> tuple[int, str] | None:
        """The microbatch and name of the first of the ``probes`` that is not finite."""
        return next((p for p, probe in zip(self._places, probes, strict=True) if not math.isfinite(probe)), None)
