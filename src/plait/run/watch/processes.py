"""Asks the kernel if a process runs, is stopped, or ended with an exit code, and if memory ran out.

    /proc/<pid>/stat                4711 (python) T 4242 ...  ... the exit code of a process that is not buried yet
    <cgroup>/memory.events          oom_kill 1

A process is identified by its id and its start time, because ids are reused.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Condition: TypeAlias = Literal["running", "stopped", "gone"]


@dataclass(frozen=True)
class ProcessState:
    """One process, seen from outside."""

    pid: int
    state: Condition
    exit_code: int | None = None
    """The exit code of a process that is gone, or minus the signal that killed it; None if it is not known."""
    out_of_memory: bool = False
    """True if the kernel says that it killed this process for its memory."""


def look(pid: int, born: int = 0, root: Path = Path("/proc")) -> ProcessState:
    """Returns the state of the process ``pid`` that was started at ``born`` (0: at any time)."""
    fields = _stat(pid, root)
    if fields is None:
        return ProcessState(pid, "running")
    if not fields or (born and int(fields[19]) != born):
        return ProcessState(pid, "gone")
    letter = fields[0]
    if letter in "ZX":
        status = int(fields[49])
        return ProcessState(pid, "gone", -(status & 0x7F) or status >> 8)
    return ProcessState(pid, "stopped" if letter in "Tt" else "running")


def born(pid: int) -> int:
    """Returns the start of a process, in ticks of the kernel; 0 if it is not known."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def started(pid: int) -> float:
    """Returns the start of a process in seconds of ``time.time``; 0 if it is not known."""
    ticks = born(pid)
    return ticks and time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int, root: Path = Path("/proc")) -> list[str] | None:
    """Returns the fields after the name, which may itself hold spaces and parentheses; empty if the process is gone,
    None if they cannot be read: this process may have no descriptor left for it."""
    try:
        return (root / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:
        return None


def launcher() -> tuple[int, int] | None:
    """Returns the process that this rank must not outlive, as (pid, born): plait's launcher, or torchrun's agent, which
    is the nearest ancestor without the variables that it gives its ranks.  None if neither started it, or if it is not
    visible, for example outside this container."""
    for name in ("PLAIT_LAUNCHER", "TORCHELASTIC_RUN_ID"):
        if name in os.environ:
            pid = os.getppid()
            while pid > 1 and _has(pid, name):  # a shell or another wrapper around the rank
                fields = _stat(pid)
                pid = int(fields[1]) if fields else 0
            pid = pid if pid > 1 else os.getppid()
            began = born(pid)
            return (pid, began) if pid and began else None
    return None


def _has(pid: int, name: str) -> bool:
    try:
        return f"\0{name}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Counts the processes of this control group that the kernel killed for their memory; 0 if it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        (inside,) = re.findall(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        files = (root / "sys/fs/cgroup" / folder / "memory.events" for folder in (inside.lstrip("/"), ""))
        for file in filter(Path.exists, files):
            return int(re.findall(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)[0])
    return 0


def readable(descriptors: Sequence[int], seconds: float) -> bool:
    """Waits until a descriptor is readable, at most ``seconds``; descriptors may have any number."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
