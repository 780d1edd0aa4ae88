"""Wakes a sleeping rank from any process that has something for it.

    sleeper                                    others
    asleep.post()                              write something
    look once more; nothing?                   asleep.take()?  then bell.post()
    bell.wait()

Either the sleeper sees the new data, or the writer sees that it is asleep; a writer whose reader is awake makes no
system call.  On ARM both may look too early, so each sleep has an end.  A late bell ends a later sleep early, which
does no harm.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.shared_memory import semaphore
from plait.shared_memory.semaphore import Semaphore

BYTES = 2 * semaphore.SIZE
"""The bytes of an alarm."""


class Alarm:
    """The alarm of one rank; each process creates its own over the same memory."""

    def __init__(self, address: int) -> None:
        self._asleep, self._bell = Semaphore(address), Semaphore(address + semaphore.SIZE)

    def begin(self) -> None:
        """Sets the alarm up; its rank calls this before others know of it."""
        self._asleep.begin()
        self._bell.begin()

    def ring(self) -> None:
        """Wakes the rank if it sleeps, after something was written for it."""
        if self._asleep.take():
            self._bell.post()

    def sleep(self, found: Callable[[], bool], seconds: float) -> bool:
        """Sleeps until it rings or the time is up, unless something is ``found``; True if there may be something."""
        self._asleep.post()
        woken = found() or self._bell.wait(seconds)
        if not self._asleep.take():  # another rank has taken it, and rings
            self._bell.take()
        return woken
