"""Numbers of different widths: the dtypes of a row, and the scale by which small gradients survive fp16.

    parameters (bf16) ──► forward, backward ──► gradients (bf16) ──► sums, reductions (fp32) ──► update
          ▲                                                                                        │
          └──────────────── rounded, sent ◄──────────── master weights (fp32) ◄────────────────────┘

fp16 has five bits of exponent: gradients below 6e-8 become zero.  So the loss is multiplied by a large power of two
before the backward, and the sums are divided by it afterwards.  A sum that is not finite means that the factor was too
large: all ranks skip the step, and the factor is halved.

Source: Mixed Precision Training (Micikevicius et al. 2018); the growth rule is that of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.table.cells import FULL, Cell, Strategy


@dataclass(frozen=True)
class Precision:
    """The dtypes of a row, without devices and cuts: all that a single process needs."""

    params: Cell = FULL
    sums: Cell = FULL
    optim: Cell = FULL
    first_scale: float | None = None
    """The loss scale of the first step; None: the loss is not scaled."""

    @classmethod
    def of(cls, row: Strategy, first_scale: float | None = None) -> Precision:
        """Returns a row's dtypes."""
        params, sums, optim = (Cell(dtype=cell.dtype) for cell in (row.params, row.grads, row.optim))
        return cls(params, sums, optim, first_scale)

    def loss_scale(self) -> LossScale | None:
        """Returns a new loss scale for a run; None if the loss is not scaled."""
        return None if self.first_scale is None else LossScale(self.first_scale)


AS_IT_COMES = Precision()
"""Leaves everything in the dtype of the model."""

SMALLEST = 2.0**-14
"""The smallest loss scale: a sum that overflows with it overflows without it too."""


@dataclass
class LossScale:
    """The factor of the loss.  Each engine has its own; all start equal, and agree on whether sums are finite.

    Raises:
        ValueError: factors with which the scale would not settle.
    """

    scale: float = 2.0**16
    """The initial factor, a power of two: scaling then changes no bit of a sum that stays in range."""
    growth: float = 2.0
    """Multiplies it after ``interval`` good steps in a row."""
    backoff: float = 0.5
    """Multiplies it after a skipped step."""
    interval: int = 2000
    good: int = 0
    """The number of steps since the factor last changed."""

    def __post_init__(self) -> None:
        if not SMALLEST <= self.scale < math.inf:
            raise ValueError(f"a loss scale of {self.scale:g}: give a number from {SMALLEST:g}, a power of two")
        if not (1 <= self.growth < math.inf and 0 < self.backoff < 1 and self.interval >= 1):
            raise ValueError(
                f"a loss scale with growth {self.growth}, backoff {self.backoff}, interval {self.interval}: give "
                f"growth of at least 1, backoff between 0 and 1, an interval of at least 1 step"
            )

    def update(self, *, finite: bool) -> None:
        """Updates the factor; ``finite`` if the step's sums were, on all ranks.  ValueError if no scale helps."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale *= self.backoff
            if self.scale < SMALLEST:
                raise ValueError(
                    f"gradients are not finite at a loss scale of {self.scale / self.backoff:g} either: the loss or "
                    f"the model has become inf or NaN; look at the last losses, lower the learning rate, or clip"
                )
        elif self.good == self.interval:
            self.scale, self.good = self.scale * self.growth, 0
