"""Decides how often a run is started again after a fault, and how long it may take to end.  Pure.

the same step for the third time, and no new checkpoint     ──►  it would be the same again: no more
"""

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass
class Restarts:
    """The faults of a run so far."""

    limits: Limits
    faults: list[tuple[int, int, str]] = field(default_factory=list)
    """(rank, step that was reached, state that had been kept) of each fault."""

    def refusal(self, rank: int, step: int, kept: str) -> str | None:
        """Notes a fault of ``rank`` in ``step``; returns why the run is not started again, None where it is."""
        self.faults.append((rank, step, kept))
        if len(self.faults) > self.limits.restarts:
            return f"not started again: {self.limits.restarts} restarts were allowed, and made"
        if self.faults.count((rank, step, kept)) >= LOOPS:
            where = f"step {step}" if step >= 0 else "front of the first step"
            return f"not started again: rank {rank} failed in {where} {LOOPS} times, without a new checkpoint"
        return None
