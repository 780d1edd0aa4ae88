"""The status page: a file in which each rank of a host writes its state, and which all of them may read.

    header   failed: 1 once a rank has failed    stop: a signal that all ranks must heed
    rank 0   step, checksum, length, number, {"rank": 0, "pid": 4711, "state": "waiting", "step": 20, ...}
             the same, older or newer
    rank 1   ...

A rank overwrites the older of its two records, so a reader finds a whole one even if the writer was killed.  The room
is allocated when the file is made.  The page is data, never code, in a folder that only its owner may enter.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from plait.comm.process_identity import from_json

SLOT = 2**14
"""Largest number of bytes of a record, and of the header."""
STEP_BYTES = 8
"""Bytes of a rank's step, before its records."""
_HEAD = struct.Struct("<IQ")

WATCH = "PLAIT_WATCH"
"""The variable that names the folder of a launcher's page, which the launcher reads."""

State = Literal["starting", "running", "waiting", "failed", "done"]


@dataclass(frozen=True)
class Status:
    """The last record of a rank.  Times are from ``time.monotonic``, which all processes of a host share."""

    rank: int
    host: str = ""
    pid: int = 0
    """0: this rank has never written."""
    state: State = "starting"
    step: int = -1
    """The step in progress; -1 before the first."""
    operation: str = ""
    """The last operation that it requested, or waits for."""
    since: float = 0.0
    """The time of the last change of state, step or operation."""
    heartbeat: float = 0.0
    steps: list[list[float]] = field(default_factory=list)
    """(seconds computed, seconds waited) of the last steps that were finished, oldest first."""
    finished: int = 0
    """Steps finished by this process: the last of ``steps`` is number ``finished``."""
    peers: list[int] = field(default_factory=list)
    """The ranks of the operation."""
    born: int = 0
    """The start of the process, in ticks of the kernel: with ``pid`` it identifies the process."""
    signal: int = 0
    """The signal that ends it."""
    error: str = ""
    """The error that ended it, in one line."""


class Page:
    """The records of ``ranks`` ranks, in a folder; OSError if it is missing or full."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks, path = folder, ranks, folder / "page"
        if not path.exists():
            draft = folder / f"page.{os.getpid()}"
            try:
                draft.write_bytes(bytes(SLOT * (1 + 2 * ranks)))
                with suppress(FileExistsError):  # another rank was first
                    os.link(draft, path)
            finally:
                draft.unlink(missing_ok=True)
        with open(path, "r+b") as file:
            self._memory, self._lock, self._slot = mmap.mmap(file.fileno(), 0), threading.Lock(), 0
        self._words = memoryview(self._memory).cast("q")

    def write(self, status: Status) -> None:
        """Replaces a rank's older record; texts and lists that are too long are cut."""
        short = {"operation": status.operation[:200], "error": status.error[:300], "peers": status.peers[:63]}
        text = json.dumps(vars(status) | short).encode()
        with self._lock:
            self._slot = 1 - self._slot
            body = _HEAD.pack(len(text), time.monotonic_ns()) + text
            data = (zlib.crc32(body).to_bytes(4, "little") + body)[: SLOT - STEP_BYTES]
            place = SLOT * (1 + 2 * status.rank + self._slot) + STEP_BYTES
            self._memory[place : place + len(data)] = data
            self.begins(status.rank, status.step)
        if status.state == "failed":
            self._memory[0] = 1

    def begins(self, rank: int, step: int) -> None:
        """Notes that a rank begins a step: in a separate word, because it happens often."""
        self._words[SLOT * (1 + 2 * rank) // STEP_BYTES] = step

    def read(self, rank: int) -> Status:
        found = [self._read(SLOT * (1 + 2 * rank + slot) + STEP_BYTES) for slot in range(2)]
        try:
            return replace(from_json(Status, max(found)[1]), step=self._words[SLOT * (1 + 2 * rank) // STEP_BYTES])
        except ConnectionError:  # none yet, or not written by plait
            return Status(rank)

    def _read(self, place: int) -> tuple[int, bytes]:
        """Returns a record and its number; empty if it is not whole."""
        data = self._memory[place : place + SLOT - STEP_BYTES]
        size, number = _HEAD.unpack_from(data, 4)
        body = data[4 : 4 + _HEAD.size + size]
        whole = data[:4] == zlib.crc32(body).to_bytes(4, "little")
        return (number, body[_HEAD.size :]) if whole else (0, b"")

    def read_all(self) -> list[Status]:
        """Returns the records of all ranks, also of those that have not written here (``pid`` 0)."""
        return [self.read(rank) for rank in range(self.ranks)]

    @property
    def failed(self) -> bool:
        """True if a rank has reported that it failed: cheap enough to check often."""
        return self._memory[0] == 1

    def ask_to_stop(self, signal_number: int) -> None:
        """Asks all ranks to end as after this signal; they see it at their next heartbeat."""
        self._memory[1] = signal_number

    @property
    def stop(self) -> int:
        """The signal that all ranks must heed; 0 if there is none."""
        return self._memory[1]
