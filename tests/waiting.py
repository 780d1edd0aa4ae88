"""What other processes and threads do, waited for with an end."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_for(what: Callable[[], object], seconds: float = 120.0, shown: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"it never came: {shown()}"
        time.sleep(0.01)


def alive(process_id: int) -> bool:
    """True for a process that runs or is stopped, and has not ended."""
    try:
        return ") Z" not in Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
