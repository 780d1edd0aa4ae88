"""Starts the ranks of one host, monitors them, and starts them again, without a network.

attempt    its own folder, with the file in which its ranks meet, and a rank for each coordinate of the mesh
look       a rank has ended, or stands still  ──►  reported  ──►  all ended
                                                                └──►  the next attempt, if ``Limits`` allow it
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.files.writing import told
from plait.comm.environment import STORE
from plait.comm.texts import named
from plait.messages.escape import say
from plait.run.launch.failure import Failure, explain, first_of, recorded
from plait.run.launch.fork_server import ForkServer
from plait.run.launch.rank_monitor import RankMonitor
from plait.run.launch.signals import Asked, announced
from plait.run.watch.page import WATCH
from plait.table.mesh import Mesh


@dataclass(frozen=True)
class Limits:
    """The restarts after a fault, and the time to end after a request, that a launch allows."""

    restarts: int = 0
    """Restarts of all ranks after faults; the ranks must be able to resume by themselves."""
    grace: float = 0.0
    """Seconds from a signal in which ranks may end after their step; 0: they are ended at once."""
    kept: Callable[[], str] = str
    """Called before a restart: returns the newest state that the ranks can resume from, "" without any.  ValueError:
    that state is the end of the run, and the fault came after it."""
    hint: Callable[[], str] = str
    """Called after a fault without a restart: returns how a user may go on."""


LOOK_SECONDS = 0.05
"""Seconds between two looks at the ranks."""

BURY_SECONDS = 20.0
"""Seconds to wait for the end of killed ranks: the kernel may have much memory to free."""


class RankAgent:
    """Runs the ranks of a mesh, which may stand still for ``deadline`` seconds.  Each attempt has a folder inside the
    private ``folder``."""

    def __init__(self, mesh: Mesh, folder: Path, server: ForkServer, limits: Limits, deadline: float) -> None:
        self._mesh, self._folder, self._server, self._deadline = mesh, folder, server, deadline
        self._limits, self._attempt = limits, -1
        self.asked = Asked(self._tell, grace=limits.grace)
        """The handler of signals to the launcher."""
        self._monitor: RankMonitor | None = None
        self._ranks: dict[int, int] = {}
        """Process ids by rank."""
        self.code = 0
        """The exit code of the last attempt."""

    def run(self) -> None:
        """Returns when the last attempt is over.  SystemExit if a signal asked for the end before the first step, or
        its time is over; ConnectionError if the server is gone, or does not report the end of killed ranks."""
        try:
            goes_on = True
            while goes_on:
                self._start()
                while (over := self._look()) is None:
                    time.sleep(LOOK_SECONDS)
                goes_on = over
        finally:
            with suppress(ConnectionError):
                self._kill()

    @property
    def _here(self) -> Path:
        return self._folder / f"attempt-{self._attempt}"

    def _start(self) -> None:
        """Starts the ranks of the next attempt."""
        shutil.rmtree(self._here, ignore_errors=True)  # the next attempt needs its room
        self._attempt += 1
        with told(self._here, 0):
            self._folder.mkdir(mode=0o700, exist_ok=True)  # another program may have cleared the temporary folder
            self._here.mkdir(mode=0o700)
        self._monitor = RankMonitor(self._mesh, self._here, self._deadline)
        if self.asked.number:  # there is no step to end after
            raise SystemExit(128 + self.asked.number)
        self._ranks = {}
        for rank in range(self._mesh.size):
            self._ranks[rank] = self._server.fork(self._variables(rank))

    def _variables(self, rank: int) -> dict[str, str]:
        size = str(self._mesh.size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_ERROR_FILE": str(note_of(self._here, rank)),
            STORE: str(self._here / "store"),
            WATCH: str(self._here),
        }

    def _look(self) -> bool | None:
        """Looks at the ranks once: None while they go on; else True if another attempt follows."""
        assert self._monitor is not None
        ended = self._ended()
        if failures := self._failures(ended):
            found = "" if first_of(failures).final else self._monitor.of_the_end(self._ended)
            first = first_of(self._failures(self._ended()))  # its end may have been reported last
            text, self.code = explain(first, str(self._mesh), found)
            return self._end(text, final=first.final)
        if len(ended) == self._mesh.size:
            self.code = 0
            return False
        if still := self._monitor.tell(ended, self._ranks):
            self.code = 1
            return self._end(f"plait: rank {still.rank} held up the others for {self._deadline:g} s: all are ended\n")
        return None

    def _failures(self, ended: Mapping[int, int]) -> list[Failure]:
        """The failures of these ranks: an exit code other than 0, or 0 before its part was done."""
        assert self._monitor is not None
        page = self._monitor.page
        failed = [rank for rank, code in ended.items() if code or page.read(rank).state != "done"]
        return [recorded(rank, ended[rank], note_of(self._here, rank)) for rank in failed]

    def _ended(self) -> dict[int, int]:
        codes = self._server.ended() if self._ranks else {}
        return {rank: codes[process] for rank, process in self._ranks.items() if process in codes}

    def _tell(self, number: signal.Signals) -> None:
        """Asks all ranks to end after their step."""
        say(announced(number, self._limits.grace))
        if self._monitor is not None:
            self._monitor.page.ask_to_stop(number)

    def _end(self, text: str, *, final: bool = False) -> bool:
        """Reports why the attempt has ended, and kills the remaining ranks; True if another attempt follows."""
        say(text)
        self._monitor = None  # a mapped file keeps its room
        self._kill()
        restarts = self._limits.restarts
        if final or self.asked.number or not restarts:
            if not final and (hint := self._limits.hint()):
                say(f"plait: {hint}\n")
            return False
        try:
            if self._attempt == restarts:
                raise ValueError(f"{restarts} restarts were allowed, and made")
            start = self._limits.kept() or "the beginning"
        except ValueError as error:
            say(f"plait: not started again: {error}\n")
            return False
        say(f"plait: restart {self._attempt + 1} of {restarts}, from {start}\n")
        return True

    def _kill(self) -> None:
        """Kills the remaining ranks: they have reported all they know, or cannot.  ConnectionError if the server does
        not report their end."""
        left = set(self._ranks) - set(self._ended())
        if left and self.asked.late:
            say(f"plait: {named(sorted(left))} did not end within {self._limits.grace:g} s (--grace)\n")
        for rank in left:
            with suppress(ProcessLookupError):
                os.kill(self._ranks[rank], signal.SIGKILL)
        end = time.monotonic() + BURY_SECONDS
        while left := set(self._ranks) - set(self._ended()):
            if time.monotonic() > end:
                who = f"{named(sorted(left))} was killed"
                raise ConnectionError(f"{who}, and {BURY_SECONDS:g} s later it is not known to have ended")
            time.sleep(0.005)


def note_of(attempt: Path, rank: int) -> Path:
    """Returns the path at which a rank writes the reason of its failure."""
    return attempt / f"note-{rank}.json"
