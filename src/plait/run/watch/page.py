"""The status page: a file that the ranks of a host write and any process that may open it reads, without a message.

    header   | magic | ranks | stop: a signal that all ranks shall heed |
    rank 0   | number | pid, state, step, ... | what it does, with whom | host, error | the last steps |
    rank 1   | ...

Each rank writes its own record only.  A sequence lock keeps readers off half a write: the number is odd while the rank
writes, and a reader that finds it odd, or another one after its copy, reads again.  No writer waits for a reader.
A rank that was killed within a write leaves an odd number; its record is then returned as it is, and says so.

The page is data, never code: numbers, and text that is decoded, cut and escaped.  It is in a folder that only its
owner may enter.  (On processors that reorder a process's stores a copy may, rarely, mix two writes.)
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from plait.messages.escape import one_line

MAGIC = b"plait page 1\0\0\0\0"
HEADER, RECORD = 64, 5120
"""Bytes of the header and of a rank's record."""

STATES = ("starting", "running", "waiting", "failed", "done")

# Words of 8 bytes at the start of a record: whole numbers, and times in seconds.  Heartbeat and signal are the
# heartbeat thread's, which writes each at once, outside of the lock.  A wait begins and ends by such words too, the
# state last: it comes with every operation, and each of them is true by itself.
NUMBER, PID, BORN, STATE, STEP, COUNT, FINISHED, SIGNAL, SINCE, WAITED, HEARTBEAT = range(11)

PHASE, OPERATION, PEERS = 32, 200, 63
ABOUT = slice(128, 128 + PHASE + OPERATION + 4 * (1 + PEERS))
"""The rank's operation and its members: one block of bytes, ready to be copied (``about``)."""
HOST, ERROR = slice(616, 680), slice(680, 1016)
RECENT, FIRST_STEP = 256, 1024 // 8
"""The number of steps that are kept, each as (seconds computed, seconds waited), and the word where they begin."""

TRIES = 1000
"""Most looks at a record that is being written: the writer needs a microsecond, unless it was killed."""


@dataclass(frozen=True)
class Status:
    """The last record of a rank.  Times are of ``time.monotonic``, which all processes of a host share."""

    rank: int
    host: str = ""
    pid: int = 0
    """0: this rank has never written."""
    state: str = "starting"
    """starting, running, waiting, failed or done."""
    step: int = -1
    """The step in progress; -1 before the first."""
    phase: str = ""
    operation: str = ""
    """The operation that it requested last, or waits for."""
    since: float = 0.0
    """The time of the last change of state, step or operation."""
    heartbeat: float = 0.0
    count: int = 0
    """Operations so far."""
    waited: float = 0.0
    """Seconds waited for others so far."""
    steps: tuple[tuple[float, float], ...] = ()
    """(seconds computed, seconds waited) of the last steps that were finished, oldest first."""
    finished: int = 0
    """Steps finished by this process: the last of ``steps`` is number ``finished``."""
    peers: tuple[int, ...] = ()
    """The ranks of the operation; the first 63 of them."""
    born: int = 0
    """The start of the process, in ticks of the kernel: with ``pid`` it identifies the process."""
    signal: int = 0
    """The last signal that asked it to end; its negative once it ends because of it."""
    error: str = ""
    """The error with which it failed, in one line."""
    whole: bool = True
    """False: it was killed while it wrote, and this may be half of two records."""


class Page:
    """One record per rank, in a mapped file."""

    def __init__(self, memory: mmap.mmap, path: Path) -> None:
        self._memory, self.path = memory, path
        self.ranks = (len(memory) - HEADER) // RECORD
        self._stop = memoryview(memory)[24:32].cast("q")

    @classmethod
    def create(cls, path: Path, ranks: int) -> Page:
        """Makes the file, complete or not at all.

        Raises:
            FileExistsError: it is there already.
            OSError: the disk is full, the folder is not there or not writable.
        """
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:  # zeros are written, because a hole in the file could kill the rank that first writes there
            with open(fd, "wb") as file:
                file.write((MAGIC + ranks.to_bytes(8, "little")).ljust(HEADER + RECORD * ranks, b"\0"))
            os.link(draft, path)
        finally:
            draft.unlink()
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Page:
        """Maps the file.

        Raises:
            ValueError: it is no status page.
            OSError: it is not there, or may not be opened.
        """
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            start, size = os.pread(fd, 24, 0), os.fstat(fd).st_size
            ranks = int.from_bytes(start[16:], "little")
            if start[:16] != MAGIC or not 0 < ranks == (size - HEADER) / RECORD:
                raise ValueError(f"{one_line(str(path))} of {size} bytes is no status page of this version of plait")
            return cls(mmap.mmap(fd, size), path)
        finally:
            os.close(fd)

    def record(self, rank: int) -> memoryview:
        """The bytes of a rank's record."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not on a page of {self.ranks} ranks")
        return memoryview(self._memory)[HEADER + rank * RECORD :][:RECORD]

    def read(self, rank: int) -> Status:
        """Reads the record of a rank; never blocks."""
        record = self.record(rank)
        number = record[:8].cast("q")
        for attempt in range(TRIES):
            before = number[0]
            copy = bytes(record)
            if before % 2 == 0 and number[0] == before:
                return _decoded(rank, copy, whole=True)
            if attempt > TRIES // 2:
                time.sleep(1e-5)
        return _decoded(rank, bytes(record), whole=False)

    def read_all(self) -> list[Status]:
        """Reads the records of all ranks, also of those that have not written here (``pid`` 0)."""
        return [self.read(rank) for rank in range(self.ranks)]

    def failed(self, rank: int) -> bool:
        """True if a rank has said that it failed: one word, cheap to look at often."""
        return bool(self.record(rank)[8 * STATE : 8 * STATE + 8].cast("q")[0] == STATES.index("failed"))

    def ask_to_stop(self, signal_number: int) -> None:
        """Asks all ranks to end as after this signal; they see it at their next heartbeat."""
        self._stop[0] = signal_number

    @property
    def stop(self) -> int:
        """The signal that all ranks must heed; 0 without."""
        return int(self._stop[0])


class StatusRecord:
    """One rank's own record, as its writer has it.  Each method is one write, of few words: three come with every
    operation of a step."""

    def __init__(self, page: Page, rank: int, host: str, pid: int, born: int) -> None:
        self._bytes = page.record(rank)
        words = self._bytes[: (HOST.start // 8) * 8]
        self._words, self._times = words.cast("q"), words.cast("d")
        self._steps = self._bytes[FIRST_STEP * 8 :].cast("d")
        self._about = self._bytes[ABOUT]
        self._number = self._words[NUMBER] | 1
        """The record's number, odd within a write; like ``_count`` and ``_waited``, it is not read back from there."""
        self._count, self._waited = 0, 0.0
        self._words[NUMBER] = self._number
        self._bytes[8:] = bytes(RECORD - 8)
        self._words[PID], self._words[BORN], self._words[STEP] = pid, born, -1
        self._times[SINCE] = self._times[HEARTBEAT] = monotonic()
        self._bytes[HOST] = _field(host, HOST.stop - HOST.start)
        self._end()

    def _begin(self) -> None:
        self._number += 1
        self._words[NUMBER] = self._number

    def _end(self) -> None:
        self._number += 1
        self._words[NUMBER] = self._number

    def asks(self, about: bytes) -> None:
        """It requests another operation: ``about`` says which."""
        words, number = self._words, self._number + 1
        words[NUMBER] = number
        self._about[:] = about
        words[STATE] = 1
        self._count += 1
        words[COUNT] = self._count
        self._times[SINCE] = monotonic()
        self._number = words[NUMBER] = number + 1

    def waits(self, about: bytes | None = None) -> None:
        """It waits for an operation: the one that it requested last, or ``about``."""
        if about is not None:
            self._begin()
            self._about[:] = about
            self._end()
        self._times[SINCE] = monotonic()
        self._words[STATE] = 2

    def waited(self, seconds: float) -> None:
        """It goes on after so many seconds."""
        times = self._times
        self._waited += seconds
        times[WAITED] = self._waited
        times[SINCE] = monotonic()
        self._words[STATE] = 1

    def begins(self, step: int, before: tuple[float, float] | None) -> None:
        """Step ``step`` begins; ``before`` is the cost of the one before: seconds computed, seconds waited."""
        words = self._words
        self._begin()
        if before is not None:
            at = words[FINISHED] % RECENT * 2
            self._steps[at], self._steps[at + 1] = before
            words[FINISHED] += 1
        words[STEP], words[STATE] = step, 1
        self._times[SINCE] = monotonic()
        self._end()

    def ends(self, state: str, error: str = "") -> None:
        """It leaves: done, or failed with this error."""
        self._begin()
        self._words[STATE] = STATES.index(state)
        self._bytes[ERROR] = _field(error, ERROR.stop - ERROR.start)
        self._times[SINCE] = monotonic()
        self._end()

    def beats(self) -> None:
        """It is alive; called by the heartbeat thread, which never takes the lock."""
        self._times[HEARTBEAT] = monotonic()

    def heard(self, signal_number: int) -> None:
        """A signal came that asks it to end, or ends it (negative); called like ``beats``."""
        self._words[SIGNAL] = signal_number


def about(phase: str, operation: str, peers: Sequence[int]) -> bytes:
    """Encodes an operation and its members as the bytes of a record."""
    ranks = [len(peers[:PEERS]), *peers[:PEERS]]
    numbers = b"".join(rank.to_bytes(4, "little") for rank in ranks)
    return _field(phase, PHASE) + _field(operation, OPERATION) + numbers.ljust(4 * (1 + PEERS), b"\0")


def _field(text: str, size: int) -> bytes:
    return text.encode(errors="replace")[:size].ljust(size, b"\0")


def _text(field: bytes) -> str:
    return one_line(field.rstrip(b"\0").decode(errors="replace"))


def _decoded(rank: int, record: bytes, *, whole: bool) -> Status:
    view = memoryview(record)
    if not any(view.cast("q")[NUMBER : PID + 1]):
        return Status(rank)
    words, times = view.cast("q"), view.cast("d")
    phase, operation, peers = record[ABOUT][:PHASE], record[ABOUT][PHASE : PHASE + OPERATION], view[ABOUT].cast("I")
    named = peers[-1 - PEERS :]
    finished = max(0, words[FINISHED])
    recent = range(max(0, finished - RECENT), finished)
    at = [FIRST_STEP + 2 * (step % RECENT) for step in recent]
    return Status(
        rank=rank,
        host=_text(record[HOST]),
        pid=words[PID],
        state=STATES[words[STATE]] if 0 <= words[STATE] < len(STATES) else "unknown",
        step=words[STEP],
        phase=_text(phase),
        operation=_text(operation),
        since=times[SINCE],
        heartbeat=times[HEARTBEAT],
        count=words[COUNT],
        waited=times[WAITED],
        steps=tuple((times[i], times[i + 1]) for i in at),
        finished=finished,
        peers=tuple(named[1 : 1 + min(named[0], PEERS)]),
        born=words[BORN],
        signal=words[SIGNAL],
        error=_text(record[ERROR]),
        whole=whole,
    )
