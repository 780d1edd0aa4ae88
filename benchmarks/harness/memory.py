"""The memory of a process, read from /proc, also while it works."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("anonymous", "resident")


def memory(*keys: str) -> int:
    """Bytes of this process under the given keys of /proc/self/status."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0].rstrip(":") in keys)


def peak_of(act: Callable[[], Any]) -> dict[str, Any]:
    """By how much anonymous memory grew at most, seen every millisecond, and the resident set; what ``act`` returned.

    Pages of a mapped file are the system's, which takes them back; the resident set counts them.  Memory that was freed
    before goes back to the system first, or it would be used again unseen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    over = threading.Event()
    seen = [memory("RssAnon")]

    def watch() -> None:
        while not over.wait(0.001):
            seen.append(memory("RssAnon"))

    Path("/proc/self/clear_refs").write_text("5")
    resident, watcher, start = memory("VmRSS"), threading.Thread(target=watch), time.perf_counter()
    watcher.start()
    returned = act()
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    return {
        "anonymous_peak": max(*seen, memory("RssAnon")) - seen[0],
        "resident_peak": memory("VmHWM") - resident,
        "seconds": seconds,
        "returned": returned,
    }
