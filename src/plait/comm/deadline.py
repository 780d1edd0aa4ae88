"""The clock of all deadlines, and a deadline for a call that may never return.

A process that is stopped (Ctrl-Z, a paused container) does not wait, and if its whole group is stopped no rank could
come.  So deadlines go by a clock that all waits of a process look at: it counts a long pause between two looks as two
seconds.

torch's stores wait in C++ for messages from their peer, some of them without a limit: a peer that accepts a connection
and is silent, or is stopped, would hold its caller forever.  So such a call runs in a thread.  When its time is up the
caller goes on, and the thread stays until the process ends.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")

LOOK_SECONDS = 2.0
"""Two looks at the clock are further apart only where the process was stopped, or did not wait."""


class WaitClock:
    """The seconds in which this process ran, from an arbitrary start; any thread may call it."""

    def __init__(self) -> None:
        self._looks = 0.0, time.monotonic(), 0.0  # counted, the last look, the one that ended the last pause

    def __call__(self) -> float:
        (counted, looked, awake), now = self._looks, time.monotonic()
        counted += min(now - looked, LOOK_SECONDS)
        self._looks = counted, now, awake if now - looked <= LOOK_SECONDS else now  # as a whole
        return counted

    def awake_since(self) -> float:
        """The moment of ``time.monotonic`` at which the last pause ended, as seen now; 0 if there was none."""
        self()
        return self._looks[2]


clock = WaitClock()
"""The clock of this process."""
awake_since = clock.awake_since


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Returns the result of ``call()``, or raises its error.

    Raises:
        TimeoutError: the call did neither in time.
    """
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="plait-within", daemon=True).start()
    end = clock() + seconds
    while (left := end - clock()) > 0 and not outcome.done():
        wait([outcome], min(left, LOOK_SECONDS / 4))
    return outcome.result(0)
