"""The ledger: one line per message that a rank requested.

Every world writes the same lines, however it moves tensors, so a run can be compared with the planner's list, byte for
byte:

    kind            axes       bytes    sent   note
    all_gather      shard       4096    2048   forward     blocks.0   0
    reduce_scatter  shard       4096    2048   microbatch  blocks.0   0

Bytes are logical (``table/collectives.py``).  A group of one moves nothing and has no line.  Totals count every line,
but only the newest lines are kept: some steps of a large run.
"""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from plait.table.collectives import Entry

MOST_KEPT = 2**15
"""The number of lines that are kept: about 9 MB."""


class Ledger:
    """The messages that one rank requested, in order."""

    def __init__(self) -> None:
        self._kept: deque[Entry] = deque(maxlen=MOST_KEPT)
        self._written = 0
        self._sent: dict[tuple[str, tuple[str, ...]], int] = {}
        """Bytes by phase and axes."""
        self._phase: str | None = None

    def add(self, entry: Entry) -> None:
        if self._phase is not None:
            entry = replace(entry, note=replace(entry.note, phase=self._phase))
        self._kept.append(entry)
        self._written += 1
        key = entry.note.phase, entry.axes
        self._sent[key] = self._sent.get(key, 0) + entry.sent

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Gives this phase to every line written inside, whatever its note says."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def __len__(self) -> int:
        """The number of lines written; also the mark that ``since`` takes."""
        return self._written

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The kept lines: all, or the newest ``MOST_KEPT``."""
        return tuple(self._kept)

    def since(self, mark: int) -> tuple[Entry, ...]:
        """The lines since ``mark = len(ledger)`` was taken; raises ValueError if the ledger was cleared since then,
        or more lines have been written than are kept."""
        gone = self._written - len(self._kept)
        if not gone <= mark <= self._written:
            fix = "ask sooner, and take the mark anew after clear()"
            raise ValueError(f"mark {mark} on a ledger that keeps the lines from {gone} to {self._written}: {fix}")
        return tuple(islice(self._kept, mark - gone, None))

    @property
    def sent(self) -> int:
        """The bytes that this rank had to send."""
        return sum(self._sent.values())

    def sent_by_phase(self) -> dict[str, int]:
        """The bytes that this rank had to send, by phase of the step."""
        by_phase: dict[str, int] = {}
        for (phase, _), sent in self._sent.items():
            by_phase[phase] = by_phase.get(phase, 0) + sent
        return by_phase

    def sent_over(self, axes: Collection[str], *, without: Collection[str] = ()) -> int:
        """The bytes of messages over any of these axes, without some phases; ``mesh.crossing``: those between hosts."""
        return sum(
            sent for (phase, over), sent in self._sent.items() if phase not in without and any(a in axes for a in over)
        )

    def clear(self) -> None:
        """Forgets every line, and the totals."""
        self._kept.clear()
        self._sent.clear()
        self._written = 0
