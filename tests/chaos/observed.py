"""A command as a child of this process: each line with the moment of its arrival, and all of its processes.

child = Observed(["train", ...])
told = child.wait_for("killed by SIGKILL", 30)     the line, or None
code = child.finish(60)                            its exit code; None: it did not end, and was ended
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from plait.run.launch.fork_server import PYTHON, die_with
from plait.run.watch.processes import look

PAUSE = 0.01
"""Seconds between two looks."""

GONE_SECONDS = 2.0
"""Within which all of a command's processes are gone when it has ended."""


class SaidLine(NamedTuple):
    """A line of the command."""

    at: float
    """``time.monotonic`` when it came."""
    stream: str
    """out, err."""
    text: str


class ProcessId(NamedTuple):
    """A process: numbers are used again, with another start."""

    pid: int
    start: int
    """Clock ticks after the machine's own start."""


class Observed:
    """``plait WORDS``, or another program, from its start to its end."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (*PYTHON, "-m", "plait"),
    ) -> None:
        self.lines: list[SaidLine] = []
        self.orphans = 0
        """Processes that it left behind, known when it has finished."""
        self.began = time.monotonic()
        kept = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
        self.process = subprocess.Popen(
            [*program, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**kept, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # it never outlives the campaign, and its ranks never outlive it
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        both = (("out", self.process.stdout), ("err", self.process.stderr))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in both]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: str, pipe: IO[str]) -> None:
        for text in pipe:
            self.lines.append(SaidLine(time.monotonic(), stream, text.rstrip("\n")))

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self, stream: str = "err") -> str:
        """All that it said there so far."""
        return "\n".join(line.text for line in list(self.lines) if line.stream == stream)

    def first(self, pattern: str, after: float = 0.0) -> SaidLine | None:
        """The first line with this in it, that came after a moment."""
        found = re.compile(pattern)
        return next((line for line in list(self.lines) if line.at > after and found.search(line.text)), None)

    def wait_for(self, pattern: str, seconds: float, after: float = 0.0) -> SaidLine | None:
        """The same, waited for; None if it has not come by then, or the command has ended without it."""
        end = time.monotonic() + seconds
        while (line := self.first(pattern, after)) is None and time.monotonic() < end:
            if self.process.poll() is not None:
                for reader in self._readers:
                    reader.join(1)
                return self.first(pattern, after)
            time.sleep(PAUSE)
        return line

    def finish(self, seconds: float) -> int | None:
        """Its exit code (below 0: the signal); None if it had to be ended.  What outlives it is in ``orphans``."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        else:
            end = time.monotonic() + GONE_SECONDS
            while (left := self.below()) and time.monotonic() < end:
                time.sleep(PAUSE)
            self.orphans = len(left)
        self.end()
        return code

    def end(self) -> None:
        """Leaves nothing behind; a second time, nothing."""
        if self.process.poll() is None:
            self.process.kill()
        for process in self.below():
            _kill(process.pid)
        self.process.wait()
        for reader, pipe in zip(self._readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(2)
            if pipe is not None and not reader.is_alive():
                pipe.close()

    def below(self) -> list[ProcessId]:
        """The processes of its session that live, without itself."""
        return [one for one in processes(session=self.pid) if one.pid != self.pid]


LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PLAIT_LAUNCHER")
"""Variables that would make the child a rank of another run."""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def processes(session: int | None = None) -> list[ProcessId]:
    """All that live, or those of a session, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX" and session in (None, int(fields[3])):
                found.append(ProcessId(int(stat.parent.name), int(fields[19])))
    return found


def alive(process: ProcessId) -> bool:
    """It is still there, and no zombie."""
    return look(process.pid, process.start).state != "gone"


class Port(NamedTuple):
    """The addresses on which a process listens."""

    pid: int
    address: str
    """As the kernel writes it: hexadecimal, 0100007F is 127.0.0.1."""
    number: int


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def listening(pids: Iterable[int]) -> list[Port]:
    """The TCP ports at which these processes listen."""
    sockets: dict[str, int] = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):  # it has been closed
                if (target := os.readlink(link)).startswith("socket:["):
                    sockets[target[8:-1]] = pid
    found = []
    for name in ("tcp", "tcp6"):
        file = Path("/proc/net") / name
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                address, _, port = fields[1].partition(":")
                found.append(Port(sockets[fields[9]], address, int(port, 16)))
    return found
