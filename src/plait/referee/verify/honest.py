"""How far honest runs lie from one another, number by number and tensor by tensor.

A gradient that is zero by symmetry (that of a key's bias, which softmax cancels) is made of rounding alone: two right
runs differ by all of it.  So what a tolerance relative to the tensor calls different is held to the spread of honest
runs: a single process again and again, in other orders and with every value off by a unit in its last place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.referee.values import gap, scale_of
from plait.referee.verify.reference import Record

MARGIN = 8.0
"""Times the largest difference of the honest runs: of a few runs, the largest is not the largest there can be."""


@dataclass(frozen=True, eq=False)
class HonestRuns:
    """Honest runs around one that is exact; ``unit`` is one in the last place of 1, in the dtype of the computation.

    The spread of a value is the largest difference between ``exact`` and one of the runs, and at least a unit in the
    last place of its largest element, for a few runs may have the same number.  Nothing in it is taken from a layout,
    or a layout's fault would widen it.
    """

    exact: Record
    runs: Sequence[Record]
    unit: float

    def loss(self, step: int) -> float:
        """The spread of a step's loss."""
        return self._of_number([run.losses[step] for run in self.runs], self.exact.losses[step])

    def norm(self, step: int) -> float:
        """The spread of a step's norm; infinite where a run has none."""
        return self._of_number([run.norms[step] for run in self.runs], self.exact.norms[step])

    def gradient(self, step: int, name: str) -> float:
        """The spread of a parameter's gradient; 0 where there is none."""
        whole = self.exact.gradients[step].get(name)
        if whole is None:
            return 0.0
        return self._of_tensor([run.gradients[step].get(name, whole) for run in self.runs], whole)

    def parameter(self, name: str) -> float:
        """The spread of a parameter after the last step."""
        return self._of_tensor([run.parameters[name] for run in self.runs], self.exact.parameters[name])

    def state(self, name: str, key: str) -> float:
        """The spread of what the optimizer keeps of a parameter; 0 where it keeps nothing."""
        whole = self.exact.state.get(name, {}).get(key)
        if whole is None:
            return 0.0
        return self._of_tensor([run.state.get(name, {}).get(key, whole) for run in self.runs], whole)

    def _of_number(self, values: Sequence[float | None], exact: float | None) -> float:
        if exact is None:
            return math.inf
        return max(*(math.inf if v is None else abs(v - exact) for v in values), self.unit * abs(exact))

    def _of_tensor(self, values: Sequence[Tensor], whole: Tensor) -> float:
        return max(*(gap(value, whole) for value in values), self.unit * scale_of(whole))
