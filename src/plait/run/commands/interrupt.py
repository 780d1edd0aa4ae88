"""Handles Ctrl-C while a command still imports its modules.  It is imported first, so it imports little itself."""

import os
import signal
from contextlib import suppress


def leave_at_once() -> None:
    """Makes SIGINT end this process with one line, because an interrupted import can raise any exception.  Replaces
    only Python's default handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Makes SIGINT raise KeyboardInterrupt again, if it did before ``leave_at_once``."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, _frame: object) -> None:
    if "PLAIT_LAUNCHER" not in os.environ:  # the launcher prints for its ranks
        with suppress(OSError):
            os.write(2, b"plait: stopped by SIGINT\n")
    os._exit(128 + number)
