"""Measures the distance of honest runs from one another, tensor by tensor.

A gradient that is zero by symmetry (that of a key's bias, which softmax cancels) is made of rounding alone: two right
runs differ by all of it.  So what a tolerance relative to the tensor calls different is held to the spread of honest
runs: a single process again and again, in other orders and with every value off by a unit in its last place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from plait.referee.values import gap, scale_of
from plait.referee.verify.observed import Record, Where, observed


@dataclass(frozen=True, eq=False)
class HonestRuns:
    """Honest runs around one that is exact; ``unit`` is one in the last place of 1, in the dtype of the computation.

    Nothing in it is taken from a layout, or a layout's fault would widen it.
    """

    exact: Record
    runs: Sequence[Record]
    unit: float

    @cached_property
    def _values(self) -> list[dict[Where, Tensor]]:
        return [{one.where: one.value for one in observed(run)} for run in (self.exact, *self.runs)]

    def spread(self, where: Where) -> float:
        """The largest difference between the exact value and one of the runs', and at least a unit in the last place of
        its largest element, for a few runs may have the same number; 0 where there is nothing."""
        exact, *others = self._values
        if (whole := exact.get(where)) is None:
            return 0.0
        if where.phase == "norm" and bool(whole.isnan().all()):
            return math.inf
        return max(*(gap(other.get(where, whole), whole) for other in others), self.unit * scale_of(whole))
