"""Who listens where, as the kernel tells it."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def listening(processes: Iterable[int]) -> set[str]:
    """The addresses, as /proc/net/tcp writes them, at which these processes listen for TCP."""
    own = set()
    for process in processes:
        for number in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                own |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{process}/fd/{number}")))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in own:
                found.add(fields[1].partition(":")[0])
    return found


def children(process: int) -> list[int]:
    """Process ids."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]
