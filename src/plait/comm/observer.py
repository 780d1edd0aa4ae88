"""Who may look at what a rank does: told of each step, each operation and each wait, in the rank's own thread.

    comm.observers += (observer,)

    begin_step(7)  ──►  asked(all_gather ...)  ──►  waits(all_gather ...)  ──►  waited(all_gather ..., from, to)

The status page of a run, the log of a pipeline's step and injected faults are observers.  Without any, a step costs
what it did.
"""

from plait.comm.operation import Operation


class Observer:
    """Does nothing; overwrite what is of interest."""

    def begin_step(self, number: int) -> None:
        """The step with this number (from 0) begins."""

    def asked(self, operation: Operation) -> None:
        """``operation`` is about to be started; what this raises, the caller of the collective gets."""

    def waits(self, operation: Operation) -> None:
        """From here on this rank may stand still for others."""

    def waited(self, operation: Operation, start: float, end: float) -> None:
        """It waited for ``operation`` between these times of ``time.perf_counter``; not told of a wait that failed."""

    def closed(self) -> None:
        """The world is left; nothing follows."""
