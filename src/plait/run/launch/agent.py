"""torch's elastic agent on one host, without a network: it starts ranks, looks after them, and starts them again.

OneHost      the rendezvous: a folder for each attempt, with the file in which ranks meet; nothing listens
RankAgent    start, look, end: torch's loop calls them
               look: a rank has ended, or stands still  ──►  said  ──►  all ended
                                                                          └──►  again, as far as ``Limits`` allow
"""

import os
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from plait.checkpoint.files.writing import told
from plait.comm.environment import STORE
from plait.messages.escape import say
from plait.run.launch.failure import explain, first_of, recorded
from plait.run.launch.fork_server import ForkServer, LostError
from plait.run.launch.limits import Limits, Restarts
from plait.run.launch.rank_monitor import RankMonitor
from plait.run.launch.signals import Asked, announced
from plait.run.watch.folder import WATCH, make_again
from plait.run.watch.processes import look
from plait.table.mesh import Mesh

_hash_store: Any = dist.HashStore  # type: ignore[attr-defined]  # torch's stubs do not export it

LOOK_SECONDS = 0.05
"""Between two looks at the ranks."""

BURY_SECONDS = 20.0
"""For which the end of ranks that were killed is waited for: the kernel may have much memory to free."""


class OneHost(RendezvousHandler):
    """The rendezvous of one host: nobody else is waited for.

    Args:
        folder: a private one; each attempt has its own in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._attempt = folder, -1

    @property
    def attempt(self) -> Path:
        """The folder of the attempt that is under way."""
        return self._folder / f"attempt-{self._attempt}"

    def next_rendezvous(self) -> RendezvousInfo:
        shutil.rmtree(self.attempt, ignore_errors=True)  # its room is the next one's
        self._attempt += 1
        with told(self.attempt, 0):
            if not self._folder.exists():  # somebody has cleared the temporary folder
                make_again(self._folder)
            self.attempt.mkdir(mode=0o700)
        return RendezvousInfo(_hash_store(), 0, 1, RendezvousStoreInfo("", 0))

    def get_backend(self) -> str:
        return "hash"

    def get_run_id(self) -> str:
        return self._folder.name

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class RankAgent(SimpleElasticAgent):
    """Looks after the ranks of a mesh.

    Args:
        folder: a private one.
        deadline: seconds for which ranks may stand still.
    """

    def __init__(self, mesh: Mesh, folder: Path, server: ForkServer, limits: Limits, deadline: float) -> None:
        self._mesh, self._server, self._limits, self._deadline = mesh, server, limits, deadline
        self._host, self._restarts = OneHost(folder), Restarts(limits)
        self.asked = Asked(self._tell, grace=limits.grace)
        """The handler of signals to the launcher."""
        self._monitor: RankMonitor | None = None
        self._ranks: dict[int, int] = {}
        """Process ids by rank."""
        self.code = 0
        """The exit code of the last attempt."""
        spec = WorkerSpec(
            role="rank",
            local_world_size=mesh.size,
            rdzv_handler=self._host,
            entrypoint="plait",
            max_restarts=limits.restarts,
            monitor_interval=LOOK_SECONDS,
        )
        super().__init__(spec)

    # ---- what torch's loop asks for ------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        end = time.monotonic() + self._restarts.pause
        while time.monotonic() < end and not self.asked.number:
            time.sleep(LOOK_SECONDS)
        self._monitor = RankMonitor(self._mesh, self._host.attempt, self._deadline)
        if self.asked.number:  # there is no step to end behind
            raise SystemExit(128 + self.asked.number)
        self._ranks = {}
        for rank in range(self._mesh.size):
            self._ranks[rank] = self._server.fork(self._variables(rank, attempt))
        return dict(self._ranks)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._monitor is not None
        try:
            ended = self._ended()
        except LostError as lost:
            return self._begin_anew(lost)
        self._monitor.tell_signals()
        failures = [
            recorded(rank, code, note_of(self._host.attempt, rank))
            for rank, code in ended.items()
            if code or not self._monitor.is_done(rank)
        ]
        if failures:
            first = first_of(failures)
            found = "" if first.final else self._monitor.of_the_end(self._ended())
            text, self.code = explain(first, str(self._mesh), found)
            return self._end(first.rank, text, final=first.final)
        if len(ended) == self._mesh.size:
            self.code = 0
            return RunResult(WorkerState.SUCCEEDED, return_values=ended)
        if still := self._monitor.tell(ended, self._ranks):
            self.code = 1
            return self._end(
                still.rank, f"plait: rank {still.rank} kept the others for {self._deadline:g} s: all are ended\n"
            )
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Kills what is left: it has said what it knows, or cannot.

        Raises:
            ConnectionError: the server does not say that they have ended.
        """
        left = set(self._ranks) - set(self._ended())
        if left and self.asked.late:
            say(f"plait: rank {_listed(left)} did not end within {self._limits.grace:g} s (--grace)\n")
        for rank in left:
            with suppress(ProcessLookupError):
                os.kill(self._ranks[rank], signal.SIGKILL)
        end = time.monotonic() + BURY_SECONDS
        while left := set(self._ranks) - set(self._ended()):
            if time.monotonic() > end:
                who = f"rank {_listed(left)} was killed"
                raise ConnectionError(f"{who}, and {BURY_SECONDS:g} s later nobody says that it ended")
            time.sleep(0.005)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        with suppress(ConnectionError):
            self._stop_workers(self._worker_group)

    # ---- how ----------------------------------------------------------------------------------

    def _variables(self, rank: int, attempt: int) -> dict[str, str]:
        here, size = self._host.attempt, str(self._mesh.size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_ERROR_FILE": str(note_of(here, rank)),
            STORE: str(here / "store"),
            WATCH: str(here),
        }

    def _ended(self) -> dict[int, int]:
        """Exit codes by rank."""
        codes = self._server.ended() if self._ranks else {}
        return {rank: codes[process] for rank, process in self._ranks.items() if process in codes}

    def _tell(self, number: signal.Signals) -> None:
        """All ranks are to end behind their step."""
        say(announced(number, self._limits.grace))
        if self._monitor is not None:
            self._monitor.page.ask_to_stop(number)

    def _begin_anew(self, lost: LostError) -> RunResult:
        """The server is gone: once its ranks are, the next attempt has another."""
        ranks, self._ranks = self._ranks.values(), {}
        end = time.monotonic() + BURY_SECONDS
        while any(look(pid).state != "gone" for pid in ranks) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        self.code = 128 - lost.code if lost.code < 0 else 1
        return self._end(0, f"plait: {lost}\n")

    def _end(self, rank: int, text: str, *, final: bool = False) -> RunResult:
        """Says what has ended the attempt, by ``rank``, and ends what is left of it; torch's loop starts another where
        that may be of use."""
        assert self._monitor is not None
        say(text)
        reached, self._monitor = self._monitor.reached, None  # what is mapped keeps its room
        self._stop_workers(self._worker_group)
        if final or self.asked.number or not self._limits.restarts:
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        try:
            kept = self._limits.kept()
            refusal = self._restarts.refusal(rank, reached, kept)
        except ValueError as error:
            refusal = f"not started again: {error}"
        if refusal:
            self._remaining_restarts = 0
            say(f"plait: {refusal}\n")
        else:
            number, most, start = len(self._restarts.faults), self._limits.restarts, kept or "the beginning"
            say(f"plait: restart {number} of {most}, from {start}\n")
        return RunResult(WorkerState.FAILED)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def note_of(attempt: Path, rank: int) -> Path:
    """Where a rank writes what it failed of."""
    return attempt / f"note-{rank}.json"
