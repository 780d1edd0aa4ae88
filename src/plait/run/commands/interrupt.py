"""Ctrl-C while a command still imports what it needs.  Little is imported here: it comes before all else."""

import os
import signal
from contextlib import suppress


def leave_at_once() -> None:
    """From now on SIGINT ends this process with one line: an import that it breaks off raises anything.  Python's own
    handler is replaced, no other."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """SIGINT is a KeyboardInterrupt again, if it was before ``leave_at_once``."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, _frame: object) -> None:
    if "PLAIT_LAUNCHER" not in os.environ:  # which speaks for its ranks
        with suppress(OSError):
            os.write(2, b"plait: stopped by SIGINT\n")
    os._exit(128 + number)
