"""The table of a step, as rows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from plait.messages.wording import seconds_text
from plait.run.report.idle import summary, timeline_rows, timeline_table
from plait.run.report.measured import as_log
from plait.run.train.timeline import Recorded, show_timeline
from plait.schedule.actions import Log
from plait.schedule.orders import one_f_one_b
from plait.schedule.passes import add_messages
from plait.schedule.simulate import Costs, simulate

STEP = simulate(one_f_one_b(2, 2), Costs())
SLOWER = as_log(simulate(add_messages(one_f_one_b(2, 2)), Costs(2.0, latency=0.5)))


def test_the_rows() -> None:
    head, *rows, last = timeline_rows(as_log(STEP), STEP)
    assert head == (
        *("rank", "stages", "computes", "warm-up", "bubble", "cool-down", "imbalance", "knock-on", "communication"),
        *("update", "other", "idle"),
    )
    assert rows == [
        ("0", "0", "66.7%", "0.0%", "33.3%", *["0.0%"] * 6, "33.3%"),
        ("1", "1", "66.7%", "11.1%", "0.0%", "22.2%", *["0.0%"] * 5, "33.3%"),
        ("all", "", "66.7%", "5.6%", "16.7%", "11.1%", *["0.0%"] * 5, "33.3%"),
    ]
    assert last == ("simulated", *rows[-1][1:])
    assert timeline_rows(SLOWER, STEP)[-1] == last


def test_a_rank_without_events_has_a_row() -> None:
    log: Log = (*as_log(STEP), ())
    assert timeline_rows(log, STEP)[3][:3] == ("2", "", "0.0%")


def test_the_summary_and_the_table() -> None:
    text = "measured 13 s, idle 38.5%; simulated 9 s, idle 33.3%"
    assert summary(SLOWER, STEP) == text
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(timeline_table(SLOWER, STEP))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == text.split()
    head, *columns = timeline_rows(SLOWER, STEP)
    for index, name in enumerate(head[1:], 1):
        cells = [column[index] for column in columns if column[index]]
        there = [*name.split(), *cells] in lines
        assert there == (name in ("stages", "idle") or any(cell != "0.0%" for cell in cells)), name


@pytest.mark.parametrize(("seconds", "told"), [((1.0, 5.0), True), ((1.0, 1.0), False)])
def test_uneven_stages_are_told_with_their_split(seconds: tuple[float, float], told: bool) -> None:
    step = simulate(one_f_one_b(2, 4), Costs(seconds, seconds, seconds))
    console = Console(record=True, file=io.StringIO())
    show_timeline(Recorded((as_log(step),), step), console, (1, 6))
    assert ('--split, which is "1 6" here' in console.export_text()) == told


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (2.5e-7, "0.25 µs"), (0.0123456, "12.3 ms"), (0.9996, "1 s"), (0.9994, "999 ms"), (1234.4, "1234 s")],
)
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
