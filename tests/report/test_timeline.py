"""A step as a grid, as rows of a table, as a drawing and as a trace file."""

import io
import json
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from rich.console import Console
from simulated import as_log

from plait.messages.escape import printable
from plait.messages.wording import seconds_text
from plait.run.report.drawing import COLOURS, LEFT, OTHERS, PLOT, TEXT, _box, _paler, svg
from plait.run.report.idle import summary
from plait.run.report.page.lanes import measured_lanes, timeline_lanes
from plait.run.report.schedule import time_grid
from plait.run.report.trace import trace_json
from plait.run.train.timeline import Recorded, show_timeline
from plait.schedule.actions import Event, Log, Span, parse_action, parse_schedule
from plait.schedule.orders import one_f_one_b, zbv
from plait.schedule.passes import add_messages
from plait.schedule.simulate import Costs, simulate


def test_stages_are_named_where_a_rank_has_several() -> None:
    assert time_grid(simulate(zbv(3, 1), Costs()), 80).splitlines() == [
        "rank 0 | F0  .   .   .   .   .   I0  W0",
        "rank 1 | .   1F0 2F0 2I0 2W0 1I0 1W0 .",
    ]


def test_one_column_is_the_greatest_common_divisor_of_all_times() -> None:
    timeline = simulate(parse_schedule("0F0 0B0"), Costs(forward=0.5, input=0.3, weight=0.45))
    assert time_grid(timeline, 80) == "rank 0 | F0 -- B0 -- --"  # 0.25 each


def test_a_long_grid_goes_on_below_and_a_huge_one_is_left_out() -> None:
    timeline = simulate(add_messages(one_f_one_b(2, 2)), Costs())
    blocks = time_grid(timeline, 22).split("\n\n")
    assert blocks[0].splitlines() == ["rank 0 | F0 F1 .  .", "rank 1 | .  F0 B0 --"]
    assert len(blocks) == 3
    huge = simulate(one_f_one_b(64, 256), Costs())
    assert time_grid(huge, 80).startswith("(no grid: 64 ranks x 957 columns")


def test_an_idle_rank_has_a_line() -> None:
    timeline = simulate(parse_schedule("0F0 0B0\n-"), Costs())
    assert time_grid(timeline, 80).splitlines()[1] == "rank 1 | .  .  ."


STEP = simulate(one_f_one_b(2, 2), Costs())
SLOWER = as_log(simulate(add_messages(one_f_one_b(2, 2)), Costs(2.0, latency=0.5)))


def test_the_summary() -> None:
    assert summary(SLOWER, STEP) == "measured 13 s, idle 38.5%; simulated 9 s, idle 33.3%"


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


SVG = "{http://www.w3.org/2000/svg}"
DRAWN = simulate(one_f_one_b(2, 2), Costs(2.0))


def test_each_pass_is_a_box_at_its_time() -> None:
    root = ET.fromstring(svg(DRAWN, "1f1b <2 x 2>"))
    found: Counter[tuple[str, float, float]] = Counter()
    for box in root.iter(f"{SVG}rect"):
        for title in box.iter(f"{SVG}title"):
            begin, width = (float(box.get(key, "")) * DRAWN.makespan / PLOT for key in ("x", "width"))
            start = begin - LEFT * DRAWN.makespan / PLOT
            found[(title.text or "").split(":")[0], round(start, 2), round(start + width, 2)] += 1
    actions = [one for rank in range(2) for one in DRAWN.line(rank)]
    assert found == Counter((str(a), round(start, 2), round(end, 2)) for a, start, end in actions if end > start)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith("rank")] == ["rank 0", "rank 1"]
    assert {"1f1b <2 x 2>", "forward", "0", "12"} <= {*texts}


def test_each_rank_has_a_curve_of_what_it_holds_where_costs_are_given() -> None:
    timeline = simulate(parse_schedule("0F0 0F1 0B0 0B1\n-"), Costs())
    picture = svg(timeline, "one works", Costs())
    root = ET.fromstring(picture)
    curves = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    heights = [{float(point.split(",")[1]) for point in curve} for curve in curves]
    assert [len(found) for found in heights] == [3, 1], "none, one and two microbatches; the other rank has none"
    assert "rank 1" in picture and picture == svg(timeline, "one works", Costs())
    assert "polyline" not in svg(timeline, "one works")


@pytest.mark.parametrize("text", ["<script>x</script>", '"/><script>x</script>', "]]><x>", "&lt;", "\x00\x1b[2J", "'"])
def test_no_script_runs_in_a_picture(text: str) -> None:
    root = ET.fromstring(svg(DRAWN, text))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "rect", "title", "text"}
    assert not any(name.startswith("on") or "href" in name for element in root.iter() for name in element.attrib)
    assert printable(text) in "".join(root.itertext())


def test_texts_can_be_read_on_every_colour() -> None:
    """A contrast of 4.5, which WCAG 2 asks of small text."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in (OTHERS, *COLOURS.values(), *(_paler(colour, 0.5) for colour in COLOURS.values())):
        low, high = sorted((luminance(TEXT), luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour


def test_a_label_has_room_around_it_or_is_left_out() -> None:
    """Boxes next to each other with texts that fill them read as one number."""
    one_stage, two_stages = ("".join(_box(parse_action("1F13"), 0, 0, 21, stages, 1.0)) for stages in ([1], [1, 3]))
    assert ">13</text>" in one_stage and "</text>" not in two_stages  # 13 alone could be of either stage


LOG: Log = (
    (
        Event(parse_action("0F0"), 0.0, 0.25),
        Event(parse_action("0REDUCE"), 0.25, 1.25, (Span(0.5, 1.0, "reduce_scatter of 'h.0'"),)),
    ),
    (Event(parse_action("1F0"), 0.0, 1.0, (Span(0.0, 0.5, "1RECV_F0"), Span(0.75, 0.875, "all_gather"))),),
    (),
)


def test_boxes_stand_on_named_tracks_in_microseconds() -> None:
    document = json.loads(trace_json(measured_lanes(LOG), timeline_lanes(simulate(one_f_one_b(2, 1), Costs()))))
    assert document["displayTimeUnit"] == "ms"
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    boxes = [e for e in document["traceEvents"] if e["ph"] == "X"]
    found = [
        (names[e["pid"], None], names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in boxes if e["pid"] < 4
    ]
    assert found == [
        ("rank 0", "compute", "forward", 0, 250_000),
        ("rank 0", "messages", "reduction", 250_000, 1_000_000),
        ("rank 1", "compute", "forward", 625_000, 375_000),
        ("rank 1", "messages", "other", 0, 500_000),
        ("rank 1", "messages", "gather", 750_000, 125_000),
    ]
    assert boxes[0]["args"] == {"stage": 0, "microbatch": 0} and boxes[1]["args"] == {"stage": 0}
    assert names[3, None] == "rank 2" and names[5, None] == "rank 1, simulated"
    assert [(e["name"], e["ts"], e["dur"]) for e in boxes if e["pid"] == 5] == [
        ("forward", 1e6, 1e6),
        ("backward", 2e6, 2e6),
    ]
