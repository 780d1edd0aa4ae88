"""Limits of a run: restarts after a fault, and seconds to end after a request."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The restarts and the time that a launch allows."""

    restarts: int = 0
    """Restarts of all ranks after faults; the ranks must be able to resume by themselves."""
    grace: float = 0.0
    """Seconds from a signal in which ranks may end after their step; 0: they are ended at once."""
    kept: Callable[[], str] = str
    """Called before a restart: returns the newest state that the ranks can resume from, "" without any.  ValueError:
    that state is the end of the run, and the fault came after it."""
    hint: Callable[[], str] = str
    """Called after a fault without a restart: returns how a user may go on."""
