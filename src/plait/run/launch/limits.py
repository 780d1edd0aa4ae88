"""Decides how often a run is started again after a fault, and how long it may take to end.  Pure.

the same step for the third time, and no new checkpoint     ──►  it would be the same again: no more
"""

from collections.abc import Callable
from dataclasses import dataclass

LOOPS = 3
"""Number of faults of one rank in one step, without a new checkpoint, that make a loop."""


@dataclass(frozen=True)
class Limits:
    """The restarts and the time that a launch allows."""

    restarts: int = 0
    """Restarts of all ranks after faults; the ranks must be able to resume by themselves."""
    grace: float = 0.0
    """Seconds that ranks get to end after their step, from a signal on; 0: they are ended at once."""
    kept: Callable[[], str] = str
    """Called before a restart: returns the newest state that the ranks can resume from, "" without any.  ValueError:
    that state is the end of the run, and the fault came after it."""
    hint: Callable[[], str] = str
    """Called after a fault without a restart: returns how a user may go on."""

    def refusal(self, faults: list[tuple[int, int, str]]) -> str | None:
        """Returns why the run is not started again after these faults; None where it is.

        Args:
            faults: the rank of each, the step that was reached, and the state that had been kept.
        """
        if len(faults) > self.restarts:
            return f"not started again: {self.restarts} restarts were allowed, and made"
        if faults.count(faults[-1]) >= LOOPS:
            rank, step, _ = faults[-1]
            where = f"step {step}" if step >= 0 else "front of the first step"
            return f"not started again: rank {rank} failed in {where} {LOOPS} times, without a new checkpoint"
        return None
