"""A call that may never return, given a deadline.

torch's stores wait in C++ for what their peer sends, some of it without any limit: a peer that accepts a connection and
is silent, or is stopped, would hold its caller forever.  So such a call runs in a thread.  When its time is up the
caller goes on, and the thread stays behind until the process ends.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What ``call()`` returns or raises.

    Raises:
        TimeoutError: it did neither in time.
    """
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="plait-within", daemon=True).start()
    return outcome.result(max(0.0, seconds))
