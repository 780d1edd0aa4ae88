"""Predicts the messages of a redistribution.

>>> print(explain(y, "batch out"))
all_gather over tensor of dim 1: 3072 bytes, this rank sends 2304      (redistribute)
"""

from dataclasses import dataclass

from plait.sharded.layout import Layout, entries, path
from plait.sharded.redistribute import NOTE
from plait.sharded.sharded_tensor import ShardedTensor
from plait.table.collectives import Entry, Note


@dataclass(frozen=True)
class Explanation:
    """The lines of this rank's ledger, and the steps in words."""

    entries: tuple[Entry, ...]
    steps: tuple[str, ...]

    @property
    def sent(self) -> int:
        """The bytes that this rank would send."""
        return sum(e.sent for e in self.entries)

    def __str__(self) -> str:
        left, kinds = iter(self.entries), {e.kind for e in self.entries}
        sends = (
            _line(step, next(left)) if step.split()[0] in kinds else f"{step}: sends nothing" for step in self.steps
        )
        return "\n".join(sends) or "sends nothing"


def _line(step: str, entry: Entry) -> str:
    about = " ".join(filter(None, [entry.note.phase, entry.note.unit]))
    return f"{step}: {entry.bytes} bytes, this rank sends {entry.sent}" + (f"      ({about})" if about else "")


def explain(x: ShardedTensor, layout: Layout | str, note: Note = NOTE) -> Explanation:
    """Predicts the messages of ``x.redistribute(layout)``: as text, each step with its bytes."""
    end = Layout.parse(layout) if isinstance(layout, str) else layout
    comm, steps = x.comm, path(x.sharding, end, x.comm.mesh)
    lines = entries(steps, tuple(x.shape), comm.mesh, comm.rank, x.dtype.itemsize, note)
    return Explanation(tuple(lines), tuple(map(str, steps)))
