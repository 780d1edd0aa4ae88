"""Wakes a rank that sleeps, from any process that has something for it.

    sleeper                                    others
    asleep.post()                              write something
    look once more; nothing?                   asleep.take()?  then bell.post()
    bell.wait()

Either the sleeper sees what was written, or the writer sees that it is asleep; a writer whose reader is awake makes no
system call.  On ARM both may look too early, so each sleep has an end.  A late bell ends a later sleep early, which
does no harm.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.shared_memory import semaphore
from plait.shared_memory.semaphore import Semaphore

BYTES = 2 * semaphore.SIZE
"""That an alarm takes."""


class Alarm:
    """That of one rank; each process makes its own over the same memory."""

    def __init__(self, address: int) -> None:
        self._asleep, self._bell = Semaphore(address), Semaphore(address + semaphore.SIZE)

    def begin(self) -> None:
        """Called by its rank, before others know of it."""
        self._asleep.begin()
        self._bell.begin()

    def ring(self) -> None:
        """Something was written for its rank."""
        if self._asleep.take():
            self._bell.post()

    def sleep(self, found: Callable[[], bool], seconds: float) -> bool:
        """Unless something is ``found`` now: until it rings, or for so long; whether there may be something."""
        self._asleep.post()
        woken = found() or self._bell.wait(seconds)
        if not self._asleep.take():  # another rank has, and rings
            self._bell.take()
        return woken
