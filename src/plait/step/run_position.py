"""The position of a rank in the run: the numbers that must be the same on all ranks at every step.

A rank that made another number of steps, threw gradients away, or has another learning rate trains another model from
then on.  Three numbers in the step's report show it; only where they differ do the ranks exchange more.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from plait.comm import Comm
from plait.comm.agree import differences
from plait.table.collectives import Note


@dataclass(frozen=True)
class RunPosition:
    """Steps made, times that gradients were thrown away, and the optimizers' options."""

    step: int
    discarded: int
    options: dict[str, str]

    @classmethod
    def of(cls, step: int, discarded: int, optimizers: Sequence[Optimizer]) -> RunPosition:
        """The position of this rank now."""
        return cls(step, discarded, options_of(optimizers))

    def numbers(self) -> list[float]:
        """Three numbers for the report."""
        return [float(self.step), float(self.discarded), float(zlib.crc32(repr(self.options).encode()))]

    def check(self, comm: Comm, rows: Sequence[Sequence[float]]) -> None:
        """Raises ValueError, on every rank, where the ranks' numbers differ."""
        if all(row == rows[0] for row in rows):
            return
        fields = {"the number of steps made": str(self.step), "gradients thrown away by zero_grad": str(self.discarded)}
        reasons = "; ".join(differences(comm, fields | self.options, Note("report")))
        raise ValueError(
            f"the ranks are not at the same place of the run: {reasons}. Every rank makes every step, with the same "
            f"options; leave a bad batch out on all of them together"
        )


def options_of(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """The options of each group, which schedules change."""
    return {
        f"optimizer {number} group {place} {key}": str(float(value)) if isinstance(value, Tensor) else repr(value)
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params" and isinstance(value, (int, float, tuple, Tensor))
    }
