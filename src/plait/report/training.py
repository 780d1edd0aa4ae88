"""The end of a training run as text: its curve, and the table of bytes, predicted and measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from rich import box
from rich.table import Table

from plait.plan.memory import Held


def human(size: float) -> str:
    """Bytes with a unit, powers of 1024, three digits: ``1.50 MiB``."""
    units, power = ("B", "KiB", "MiB", "GiB", "TiB"), 0
    while size >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.{2 if power else 0}f} {units[power]}"


@dataclass(frozen=True)
class RankBytes:
    """One rank's bytes: what it holds between steps and what it sends per step, as predicted and as measured."""

    rank: int
    predicted: Held
    measured: Held
    sent_predicted: int
    sent_measured: int
    gathered_peak: int
    """The most that gathered parameters took on top of what is held."""
    peak_open: int
    """The most units unsharded at once, not counting the ancestors of the running one."""


def bytes_table(ranks: Sequence[RankBytes]) -> Table:
    """Predicted and measured, by kind of state; ranks with the same numbers share their lines."""
    table = Table(title="bytes per rank", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("rank", "", "predicted", "measured", "agree"):
        table.add_column(heading, justify="left" if heading in ("rank", "") else "right")
    groups: dict[RankBytes, list[int]] = {}
    for r in ranks:
        groups.setdefault(replace(r, rank=0), []).append(r.rank)
    for r, members in groups.items():
        who = ", ".join(map(str, members)) if len(members) < 5 else f"{members[0]} .. {members[-1]} ({len(members)})"
        for name, predicted, measured in (
            ("held: parameters", r.predicted.params, r.measured.params),
            ("held: gradients", r.predicted.grads, r.measured.grads),
            ("held: optimizer state", r.predicted.optimizer, r.measured.optimizer),
            ("sent per step", r.sent_predicted, r.sent_measured),
        ):
            agree = "to the byte" if predicted == measured else f"{measured - predicted:+,} B"
            table.add_row(who, name, human(predicted), human(measured), agree)
            who = ""
        if r.gathered_peak:
            table.add_row("", "gathered at most", "", human(r.gathered_peak), "")
    return table


def spark(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of block characters, low to high; each column is a mean."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)]
    means = [fmean(values[start:stop]) for start, stop in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) / ((high - low) or 1) * 7)] for mean in means)
