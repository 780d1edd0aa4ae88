"""Shows a timeline: a grid of characters over time, and a table next to the closed forms.

    rank 0 | F0 F1 .  .  B0 -- .  B1 --        F0: forward of microbatch 0; --: the same pass continues; . : idle
    rank 1 | .  F0 B0 -- F1 B1 --

One column is the greatest common divisor of all starts and ends.
"""

import math
from fractions import Fraction

from rich.table import Table

from plait.run.report.drawing import label
from plait.run.report.screen import empty_table
from plait.schedule.actions import PASSES
from plait.schedule.bubbles import Bubbles
from plait.schedule.check import Proof
from plait.schedule.simulate import Timeline

MOST_CELLS = 40_000
"""Largest number of cells in a printed grid."""


def time_grid(timeline: Timeline, width: int) -> str:
    """Draws the timeline in characters, in blocks of at most ``width``, or returns a line that says why not."""
    lines = map(timeline.line, range(len(timeline.schedule)))
    spans = [[(action, _rational(a), _rational(b)) for action, a, b in line if action.kind in PASSES] for line in lines]
    moments = {t for line in spans for _, start, end in line for t in (start, end)} - {Fraction(0)}
    denominator = math.lcm(*(t.denominator for t in moments))
    unit = Fraction(math.gcd(*(int(t * denominator) for t in moments)), denominator) if moments else Fraction(1)
    columns = int(max(moments, default=Fraction(0)) / unit)
    if columns * len(spans) > MOST_CELLS:
        return f"(no grid: {len(spans)} ranks x {columns} columns; plait schedule draw makes a picture)"
    rows = []
    for line in spans:
        several = len({action.stage for action, _, _ in line}) > 1
        cells = ["."] * columns
        for action, start, end in line:
            first, last = int(start / unit), int(end / unit)
            cells[first:last] = [label(action, several), *["-"] * (last - first - 1)][: last - first]
        rows.append(cells)
    wide = max((len(cell) for cells in rows for cell in cells), default=1)
    heads = [f"rank {rank:<{len(str(len(rows) - 1))}} |" for rank in range(len(rows))]
    per_block = max(1, (width - len(heads[0])) // (wide + 1)) if heads else 1
    padded = [["-" * wide if cell == "-" else cell.ljust(wide) for cell in cells] for cells in rows]
    blocks = (
        [f"{head} {' '.join(cells[at : at + per_block])}".rstrip() for head, cells in zip(heads, padded, strict=True)]
        for at in range(0, columns, per_block)
    )
    return "\n\n".join(map("\n".join, blocks))


def _rational(time: float) -> Fraction:
    return Fraction(time).limit_denominator(1000)


def bubble_table(timeline: Timeline, proof: Proof, formula: Bubbles) -> Table:
    """A table of each rank's work, waits and peak activations, next to the closed form."""
    heads = ("rank", "stages", "work", "waits", "formula", "idle share", "peak activations", "formula")
    table = empty_table("", *heads)
    for rank, peak in enumerate(proof.peaks):
        table.add_row(
            str(rank),
            ", ".join(str(stage) for stage, owner in enumerate(proof.owner) if owner == rank),
            f"{timeline.work(rank):g}",
            f"{timeline.waits(rank):g}",
            "" if formula.waits is None else f"{formula.waits[rank]:g}",
            f"{timeline.idle_share(rank):.4f}",
            str(peak),
            "" if formula.peaks is None else str(formula.peaks[rank]),
        )
    return table


def share_line(timeline: Timeline, formula: Bubbles) -> str:
    """A line with the step's time, and rank 0's idle share against the closed form."""
    span = timeline.work(0) + timeline.waits(0)
    share = timeline.waits(0) / span if span else 0.0
    closed = "no closed form here" if formula.idle_share is None else f"formula {formula.idle_share:.4f}"
    from_rank_0 = f"idle share of rank 0 from its first pass to its last {share:.4f} ({closed})"
    return f"time {timeline.makespan:g}; {from_rank_0}; of all ranks over the whole time {timeline.idle_share():.4f}"
