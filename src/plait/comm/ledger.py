"""The ledger: one line per message that a rank asked for.

Every world writes the same lines, whatever it moves them with, so a run can be held against the
planner's list, byte for byte:

    kind            axes       bytes    sent   note
    all_gather      shard       4096    2048   forward   blocks.0   0
    reduce_scatter  shard       4096    2048   backward  blocks.0   0

Bytes are logical (``core/collectives.py``).  A group of one moves nothing and has no line.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.core.collectives import Entry


class Ledger:
    """What one rank asked its world to move, in the order of asking."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self.add = self._entries.append
        """Appends one entry.  Bound once: this stands in the hot path of every collective."""

    def __len__(self) -> int:
        """The number of lines; also the mark that ``since`` takes."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All lines so far."""
        return tuple(self._entries)

    def since(self, mark: int) -> tuple[Entry, ...]:
        """The lines written after ``mark = len(ledger)`` was taken.

        Raises:
            ValueError: the ledger was cleared in between and is now shorter than the mark.
        """
        if not 0 <= mark <= len(self._entries):
            raise ValueError(
                f"mark {mark} on a ledger of {len(self._entries)} lines: "
                "take the mark with len(ledger), and take it anew after clear()"
            )
        return tuple(self._entries[mark:])

    @property
    def sent(self) -> int:
        """Bytes this rank had to send."""
        return sum(e.sent for e in self._entries)

    def sent_by_phase(self) -> dict[str, int]:
        """Bytes this rank had to send, by the phase of the step."""
        totals: dict[str, int] = {}
        for entry in self._entries:
            totals[entry.note.phase] = totals.get(entry.note.phase, 0) + entry.sent
        return totals

    def clear(self) -> None:
        """Forgets every line."""
        self._entries.clear()
