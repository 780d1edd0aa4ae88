"""Monitors ranks for the launcher without asking them: by their last records, and by the kernel.

page, /proc, exit codes  ──►  diagnose  ──►  reported once, with the stacks of ranks that stand still
                                        └──►  too long: the attempt is over
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from plait.checkpoint.files.writing import told
from plait.comm.deadline import awake_since, clock
from plait.messages.escape import say
from plait.run.watch.diagnose import ENDED, LONG, Diagnosis, Kind, block, cause, diagnose
from plait.run.watch.page import SLOT, Page
from plait.run.watch.processes import ProcessState, look, out_of_memory_kills
from plait.run.watch.stacks import with_stacks
from plait.table.mesh import Mesh

SETTLE_SECONDS = 0.4
"""Seconds between the end of a rank and the report: the others begin to wait for it, and record that."""

BETWEEN_SECONDS = 0.5
"""Seconds between two diagnoses of ranks that all live."""


class RankMonitor:
    """Monitors the ranks of one attempt, which write their states in its folder, and may stand still for ``deadline``
    seconds."""

    def __init__(self, mesh: Mesh, folder: Path, deadline: float) -> None:
        self._mesh, self._folder, self._deadline = mesh, folder, deadline
        with told(folder, SLOT * (1 + 2 * mesh.size)):
            self.page = Page(folder, mesh.size)
        self._long, self._next = min(LONG, deadline / 2), 0.0
        self._told: dict[tuple[Kind, int], float] = {}
        self._memory = out_of_memory_kills()

    def of_the_end(self, ended: Callable[[], Mapping[int, int]]) -> str:
        """Returns the text for ranks that have ended; "" if none of them has left a report.  Waits for their cause."""
        time.sleep(SETTLE_SECONDS)
        return block(cause(lambda: [one for one in self._found(ended()) if one.kind in ENDED]))

    def tell(self, ended: Mapping[int, int], ranks: Mapping[int, int]) -> Diagnosis | None:
        """Reports new findings; returns the finding that has lasted for the deadline, if there is one.  ``ended`` has
        the exit codes of ranks that have ended, ``ranks`` the process ids, both by rank."""
        clock()
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + BETWEEN_SECONDS
        found = [one for one in self._found(ended) if one.kind not in ENDED]
        lasting = {(one.kind, one.rank) for one in found}
        lasting |= {key for key in self._told if key[0] == "straggler"}
        self._told = {key: since for key, since in self._told.items() if key in lasting}
        fresh = [one for one in found if self._told.setdefault((one.kind, one.rank), now) == now]
        say(block(with_stacks(fresh, self._folder, ranks)))
        return next((one for one in found if self._too_long(one, now)), None)

    def _too_long(self, one: Diagnosis, now: float) -> bool:
        if one.kind == "straggler":
            return False
        before = 0.0 if one.kind == "stopped" else self._long
        return now - max(self._told[one.kind, one.rank], awake_since()) >= self._deadline - before

    def _found(self, ended: Mapping[int, int]) -> list[Diagnosis]:
        statuses = self.page.read_all()
        states = [
            ProcessState(s.pid, "gone", code, code == -9 and out_of_memory_kills() > self._memory)
            if (code := ended.get(s.rank)) is not None
            else look(s.pid, s.born)
            for s in statuses
        ]
        return diagnose(statuses, states, time.monotonic(), self._mesh, self._long, awake_since())
