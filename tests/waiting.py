"""Waits for other processes and threads, with a deadline.  Counts work, as a clock depends on the machine."""

import sys
import time
from collections.abc import Callable
from pathlib import Path


def wait_for(what: Callable[[], object], seconds: float = 120.0, shown: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"it never came: {shown()}"
        time.sleep(0.01)


def calls_of(work: Callable[[], object]) -> int:
    """Returns the number of Python functions that it calls, which a busy machine does not change."""
    count, before = 0, sys.getprofile()

    def entered(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(entered)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def alive(process_id: int) -> bool:
    """True for a process that runs or is stopped, and has not ended."""
    try:
        return ") Z" not in Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False


def children(process: int) -> list[int]:
    """Process ids."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]
