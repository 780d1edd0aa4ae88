"""Limits of a run: restarts after a fault, and seconds in which it ends when it is asked to."""

from collections.abc import Callable
from dataclasses import dataclass


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
