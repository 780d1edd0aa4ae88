"""Signals that ask a run to end: behind the step that is under way, or at once.

SIGTERM, SIGHUP, SIGUSR1   behind the step, again and again       Slurm's early warning is SIGUSR1
SIGINT                     behind the step; a second one at once
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What asks a run to end."""


@contextmanager
def heard(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within the block ``handle`` is called with each of these signals; one that is ignored (``nohup``) stays so.
    Python hears signals in its main thread alone: in another one nothing is changed."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in ASKING}
        before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda got, _frame: handle(signal.Signals(got)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Asked:
    """The first signal that asked for the end; a handler for ``heard``.

    Args:
        tell: passes it on to the ranks.
        grace: seconds that they have to end behind their step; 0: this process ends at once, by SystemExit.
    """

    def __init__(self, tell: Callable[[signal.Signals], None], *, grace: float) -> None:
        self.number: signal.Signals | None = None
        self.since = 0.0
        """By ``time.monotonic``."""
        self._tell, self._grace = tell, grace

    def __call__(self, number: signal.Signals) -> None:
        first = self.number is None
        if first:
            self.number, self.since = number, time.monotonic()
        if not self._grace or (not first and number == signal.SIGINT):
            raise SystemExit(128 + number)
        if first:
            self._tell(number)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return self.number is not None and time.monotonic() > self.since + self._grace


def announced(number: signal.Signals, grace: float) -> str:
    """What is said at the first signal."""
    return (
        f"plait: {number.name}: all ranks end behind their step, within {grace:g} s (--grace); a second SIGINT ends "
        f"them at once\n"
    )
