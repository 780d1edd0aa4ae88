"""Observers of a rank: they are notified of each step, operation and wait, in the rank's own thread.

    comm.observers += (observer,)

    begin_step(7)  ──►  asked(all_gather ...)  ──►  waits(all_gather ...)  ──►  waited(all_gather ..., from, to)

The status page of a run, the log of a pipeline's step, injected faults and the comparison of collectives are observers.
Without observers, they cost a step nothing.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType

from plait.comm.operation import Operation

NOBODY = nullcontext()
"""Surrounds a wait if there are no observers."""


class Observer:
    """Does nothing; override the methods of interest."""

    def begin_step(self, number: int) -> None:
        """Step ``number`` (from 0) begins."""

    def asked(self, operation: Operation) -> None:
        """``operation`` is about to be started; an error raised here reaches the caller of the collective."""

    def waits(self, operation: Operation) -> None:
        """This rank may wait for others from now on."""

    def waited(self, operation: Operation, start: float, end: float) -> None:
        """This rank waited for ``operation`` between these times (``perf_counter``); not called if the wait failed."""

    def closed(self) -> None:
        """This rank has left the world; nothing follows."""


class Waiting:
    """Surrounds a place where a rank may wait for others.  The end of a wait that fails is not reported."""

    __slots__ = ("_observers", "_operation", "_start")

    def __init__(self, observers: Sequence[Observer], operation: Operation) -> None:
        self._observers, self._operation, self._start = observers, operation, 0.0

    def __enter__(self) -> None:
        for observer in self._observers:
            observer.waits(self._operation)
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            end = time.perf_counter()
            for observer in self._observers:
                observer.waited(self._operation, self._start, end)
