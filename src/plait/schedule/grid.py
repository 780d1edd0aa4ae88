"""A schedule as a grid without time: a line per rank, a column per place, failing cells between > and <.

    rank 0 |  0F0   0F1   0B0   0B1
    rank 1 |  1F0  >1F0<  1B0   1B1

Of a large schedule, the neighbourhood of the first mark is shown.
"""

from plait.schedule.actions import Schedule

Place = tuple[int, int]
"""Rank, and index in its line."""

MOST_COLUMNS, MOST_RANKS = 16, 16


def refusal(schedule: Schedule, reason: str, *marked: Place) -> ValueError:
    """The error with its reason and the schedule, the failing cells marked."""
    return ValueError(f"{reason}\n{grid(schedule, frozenset(marked))}")


def grid(schedule: Schedule, marked: frozenset[Place] = frozenset()) -> str:
    """The schedule with the marked places between ``>`` and ``<``; a place past the end of a line shows ``>?<``."""
    columns = max([*map(len, schedule), *(index + 1 for _, index in marked)], default=0)
    rank, index = min(marked, default=(0, 0))
    left = max(0, min(index - MOST_COLUMNS // 2, columns - MOST_COLUMNS))
    top = max(0, min(rank - MOST_RANKS // 2, len(schedule) - MOST_RANKS))
    shown = range(left, min(columns, left + MOST_COLUMNS))
    rows = [[_cell(schedule, (r, i), marked) for i in shown] for r in range(top, min(len(schedule), top + MOST_RANKS))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(shown))]
    before, after = " ..." if left else "", " ..." if shown.stop < columns else ""
    lines = []
    for rank, row in enumerate(rows, start=top):
        cells = "".join(f" {cell:^{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(f"rank {rank:<{len(str(len(schedule)))}} |{before}{cells}{after}".rstrip())
    hidden = len(schedule) - len(rows)
    return "\n".join(lines + [f"({hidden} more ranks)"] * (hidden > 0))


def _cell(schedule: Schedule, place: Place, marked: frozenset[Place]) -> str:
    rank, index = place
    text = str(schedule[rank][index]) if index < len(schedule[rank]) else ""
    return f">{text or '?'}<" if place in marked else f" {text} "
