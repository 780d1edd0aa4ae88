"""The stacks of a rank's threads: a signal asks for them, and the rank writes them from within C in any state.

asker    SIGUSR2 ──► the rank    faulthandler ──► folder/stack-<rank>.txt ──► the asker reads the new text
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from plait.run.watch import processes
from plait.run.watch.diagnose import STANDING, Diagnosis

STACKS = signal.SIGUSR2
"""A signal that ends a process that does not listen: only a rank that has its file is asked."""

MOST = 20_000
"""The largest number of characters that are read."""


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def listen(folder: Path, rank: int) -> TextIO | None:
    """Makes this process write its stacks on request; returns None if the user has set a handler, or the folder has no
    room."""
    if signal.getsignal(STACKS) != signal.SIG_DFL:
        return None
    draft = folder / f".stack-{rank}"
    with contextlib.suppress(OSError):
        file = open(draft, "w")  # noqa: SIM115 - faulthandler writes into it for as long as the rank lives
        faulthandler.register(STACKS, file=file, all_threads=True)
        draft.rename(file_of(folder, rank))
        return file
    return None


def hush(file: TextIO | None, folder: Path, rank: int) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            file_of(folder, rank).unlink()
        faulthandler.unregister(STACKS)
        file.close()


def with_stacks(found: Iterable[Diagnosis], folder: Path, pids: Mapping[int, int]) -> list[Diagnosis]:
    """Adds the stacks of ranks that stand still to their diagnoses; ``pids`` has process ids by rank."""
    return [
        replace(one, stack=ask(folder, one.rank, pids[one.rank])) if one.kind in STANDING and one.rank in pids else one
        for one in found
    ]


def ask(folder: Path, rank: int, pid: int) -> str:
    """Returns the current stacks of a rank; "" if it is stopped, gone, or does not listen."""
    file = file_of(folder, rank)
    with contextlib.suppress(OSError):
        size, end = file.stat().st_size, time.monotonic() + 1
        if processes.look(pid).state != "running":
            return ""
        os.kill(pid, STACKS)
        while file.stat().st_size == size and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.05)  # it writes line by line
        with open(file, errors="replace") as text:
            text.seek(size)
            return text.read(MOST)
    return ""
