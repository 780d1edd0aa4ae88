"""Signals that ask a run to end, after the current step or at once.

SIGTERM, SIGHUP, SIGUSR1   after the step, again and again       Slurm's early warning is SIGUSR1
SIGINT                     after the step; a second one at once
(none, once the time is over)                                     at once
"""

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to end."""


@contextmanager
def heard(asked: "Asked") -> Iterator[None]:
    """Calls ``asked`` with each of these signals within the block; an ignored one (``nohup``) stays ignored.
    Python hears signals only in its main thread: in another one nothing is changed."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in ASKING}
        before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda got, _frame: asked(signal.Signals(got)))
    try:
        yield
    finally:
        asked.ended = True
        for number, handler in before.items():
            signal.signal(number, handler)


class Asked:
    """The first signal that asked for the end, and the remaining time; for ``heard``.

    Args:
        tell: passes the signal on to the ranks.
        grace: seconds that the ranks have to end after their step; 0: this process ends at once, by SystemExit.
    """

    def __init__(self, tell: Callable[[signal.Signals], None], *, grace: float) -> None:
        self.number: signal.Signals | None = None
        self.ended = False
        """True if this process has finished everything that a signal could end."""
        self.late = False
        """True once the time is over."""
        self._tell, self._grace = tell, grace

    def __call__(self, number: signal.Signals) -> None:
        first = self.number is None
        if first:
            self.number = number
        if not self._grace or self.late or (not first and number == signal.SIGINT):
            raise SystemExit(128 + number)
        if first:
            _thread.start_new_thread(self._limit, (number,))  # the main thread may hold a lock of ``threading``
            self._tell(number)

    def _limit(self, number: signal.Signals) -> None:
        """Sends the signal again when the time is over."""
        time.sleep(self._grace)
        if not self.ended:
            self.late = True
            signal.pthread_kill(threading.main_thread().ident or 0, number)


def announced(number: signal.Signals, grace: float) -> str:
    """Returns the text to show at the first signal."""
    return (
        f"plait: {number.name}: all ranks end after their step, within {grace:g} s (--grace); a second SIGINT ends "
        f"them at once\n"
    )
