"""The text of a training run: its header, its progress lines, and the table of bytes, predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from plait.plan.memory import Held


def human(size: float) -> str:
    """Bytes with a unit, powers of 1024, three digits: ``1.50 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError


@dataclass(frozen=True)
class RankBytes:
    """One rank's bytes: what it holds between steps and what it sends per step, as predicted and as measured.

    ``gathered_peak`` is the most that gathered parameters took on top of that, ``peak_open`` the most units unsharded
    at once, not counting the ancestors of the running one.
    """

    rank: int
    predicted: Held
    measured: Held
    sent_predicted: int
    sent_measured: int
    gathered_peak: int
    peak_open: int


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


def progress_line(
    step: int, steps: int, loss: float, rate: float, unit: str, norm: float | None, seconds_left: float
) -> str:
    """One line of progress; ``rate`` is in ``unit`` per second over all ranks."""
    clipped = "" if norm is None else f"  grad norm {norm:7.3f}"
    width = len(str(steps))
    return f"step {step:{width}d}/{steps}  loss {loss:8.4f}{clipped}  {rate:9.0f} {unit}/s  {seconds_left:5.0f} s left"


def spark(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of block characters, low to high; each column is a mean of what is finite."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    columns = min(width, len(values))
    means = []
    for i in range(columns):
        part = values[i * len(values) // columns : (i + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[round((m - low) / ((high - low) or 1) * 7)] for m in means)
