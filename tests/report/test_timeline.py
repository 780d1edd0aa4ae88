"""The picture of a step, as XML, and its table, as rows."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import pytest
from rich.console import Console

from plait.run.report.drawing import COLOURS, TEXT, box_of, paler, seconds_text, text_in
from plait.run.report.measured import as_log, measured_timeline
from plait.run.report.timeline import CAUSES, LEFT, PLOT, STYLE, summary, timeline_rows, timeline_svg, timeline_table
from plait.schedule.actions import Event, Log, Span, parse_action
from plait.schedule.orders import one_f_one_b
from plait.schedule.passes import add_messages, add_sharding, add_step
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE

SVG = "{http://www.w3.org/2000/svg}"


def titled(picture: str) -> list[tuple[str, ET.Element]]:
    """The shapes that have a title, with it."""
    root = ET.fromstring(picture)
    return [(title.text or "", shape) for shape in root.iter(f"{SVG}rect") for title in shape.iter(f"{SVG}title")]


def span(shape: ET.Element, seconds: float) -> tuple[float, float]:
    """From when to when a shape reaches, if the whole width is so many seconds."""
    x, width = float(shape.get("x", "")) - LEFT, float(shape.get("width", ""))
    return x / PLOT * seconds, (x + width) / PLOT * seconds


STEP = simulate(one_f_one_b(2, 2), Costs())
SLOWER = as_log(simulate(add_messages(one_f_one_b(2, 2)), Costs(2.0, latency=0.5)))


def test_the_rows() -> None:
    head, *rows = timeline_rows(as_log(STEP))
    assert head == (
        *("rank", "stages", "computes", "warm-up", "bubble", "cool-down", "imbalance", "knock-on", "communication"),
        *("update", "other", "idle"),
    )
    assert rows == [
        ("0", "0", "66.7%", "0.0%", "33.3%", *["0.0%"] * 6, "33.3%"),
        ("1", "1", "66.7%", "11.1%", "0.0%", "22.2%", *["0.0%"] * 5, "33.3%"),
        ("all", "", "66.7%", "5.6%", "16.7%", "11.1%", *["0.0%"] * 5, "33.3%"),
    ]
    *measured, last = timeline_rows(SLOWER, STEP)
    assert last == ("simulated", *rows[-1][1:])
    assert [row[0] for row in measured] == ["rank", "0", "1", "all"]


def test_a_rank_without_events_has_a_row_and_a_lane() -> None:
    log: Log = (*as_log(STEP), ())
    assert timeline_rows(log)[3][:3] == ("2", "", "0.0%")
    assert "rank 2" in timeline_svg(log)


def test_the_summary_and_the_table() -> None:
    assert summary(as_log(STEP)) == "measured 9 s, idle 33.3%"
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


def test_measured_and_simulated_passes_stand_on_one_scale() -> None:
    shapes = titled(timeline_svg(SLOWER, STEP, "both"))
    end = measured_timeline(SLOWER).makespan
    found = Counter((title.split(":")[0], *(round(t, 2) for t in span(shape, end))) for title, shape in shapes)
    for timeline in (STEP, measured_timeline(SLOWER)):
        for line, starts, ends in zip(timeline.schedule, timeline.starts, timeline.ends, strict=True):
            for action, a, b in zip(line, starts, ends, strict=True):
                if b > a:
                    assert found[str(action), round(a, 2), round(b, 2)] == 1, action


def test_a_simulated_lane_stands_above_its_measured_one() -> None:
    root = ET.fromstring(timeline_svg(SLOWER, STEP))
    lanes = [(t.text, float(t.get("y", ""))) for t in root.iter(f"{SVG}text") if t.text in ("simulated", "measured")]
    assert [name for name, _ in lanes] == ["simulated", "measured"] * 4  # two ranks, lanes and bars
    assert [y for _, y in lanes] == sorted(y for _, y in lanes)


def test_waits_are_hatched_where_they_were_and_split_a_pass() -> None:
    log: Log = (
        (
            Event(parse_action("0F0"), 0, 4, (Span(1, 2, "all_gather of <wte>"),)),
            Event(parse_action("0B0"), 4, 8),
            Event(parse_action("0UPDATE"), 8, 10),
        ),
    )
    shapes = titled(timeline_svg(log))
    hatched = [(title, span(shape, 10)) for title, shape in shapes if shape.get("fill") == "url(#wait)"]
    assert hatched == [("0F0 waited 1 s for all_gather of <wte>", pytest.approx((1, 2)))]
    assert [span(shape, 10) for title, shape in shapes if title.startswith("0F0:")] == [
        pytest.approx((0, 1)),
        pytest.approx((2, 4)),
    ]
    (update,) = (shape for title, shape in shapes if title.startswith("0UPDATE:"))
    (backward,) = (shape for title, shape in shapes if title.startswith("0B0:"))
    assert update.get("fill") == CAUSES["update"][1]
    assert float(update.get("height", "")) < float(backward.get("height", "")) / 2  # a strip, not a box


def test_the_bars_are_as_long_as_the_step_and_without_gaps() -> None:
    full = add_messages(add_step(add_sharding(one_f_one_b(3, 4), TABLE["zero3"])))
    log = as_log(simulate(full, Costs((1, 2, 1), latency=0.3, unshard=0.2, reduce=0.4, update=0.5)))
    seconds = measured_timeline(log).makespan
    names = {name for name, _ in CAUSES.values()}
    bars: dict[str, list[tuple[float, float]]] = {}
    for title, shape in titled(timeline_svg(log)):
        if title.split(":")[0] in names:
            bars.setdefault(shape.get("y", ""), []).append(span(shape, seconds))
    assert len(bars) == 3
    for bar in bars.values():
        assert bar[0][0] == 0
        assert bar[-1][1] == pytest.approx(seconds, abs=0.01)
        assert all(a[1] == pytest.approx(b[0], abs=0.01) for a, b in pairwise(bar))


def test_the_picture_says_what_it_shows_and_is_always_the_same() -> None:
    picture = timeline_svg(SLOWER, STEP, "1f1b <2 x 2>")
    texts = {text.text for text in ET.fromstring(picture).iter(f"{SVG}text")}
    assert {"1f1b <2 x 2>", summary(SLOWER, STEP), "forward", "backward", "waits", "idle 33.3%", "0", "10 s"} <= texts
    assert "weight part" not in texts
    assert picture == timeline_svg(SLOWER, STEP, "1f1b <2 x 2>")


def luminance(colour: str) -> float:
    """Of a colour ``#rrggbb``, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_texts_can_be_read_on_light_and_on_dark() -> None:
    """A contrast of 4.5, which WCAG 2 asks of small text: words on the ground, and numbers on every colour."""
    for theme in STYLE.split("@media"):
        fills = dict(re.findall(r"\.(\w+) \{ fill: (#\w{6})", theme))
        for ink in ("ink", "faint"):
            assert contrast(fills[ink], fills["ground"]) >= 4.5
    for colour in (*COLOURS.values(), *(paler(c, 0.5) for c in COLOURS.values()), *(c for _, c in CAUSES.values())):
        assert contrast(TEXT, colour) >= 4.5, colour


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (2.5e-7, "0.25 µs"),
        (0.0123456, "12.3 ms"),
        (0.9996, "1 s"),
        (0.9994, "999 ms"),
        (1, "1 s"),
        (999.7, "1000 s"),
        (1234.4, "1234 s"),
        (5e-10, "0.0005 µs"),
    ],
)
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_label_has_room_around_it_or_is_left_out() -> None:
    """Boxes next to each other with texts that fill them read as one number."""
    action = parse_action("1F13")
    assert list(text_in(0, 0, 20, 10, "F13")) == [] and len(list(text_in(0, 0, 28, 10, "F13"))) == 1
    one_stage, two_stages = ("".join(box_of(action, 0, 0, 21, 10, stages)) for stages in ([1], [1, 3]))
    assert ">13</text>" in one_stage and "</text>" not in two_stages  # 13 alone could be of either stage
