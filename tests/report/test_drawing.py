"""The drawing of steps, as XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter

import pytest

from plait.messages.escape import printable
from plait.run.report.drawing import COLOURS, LEFT, OTHERS, PLOT, TEXT, _box, _paler, svg
from plait.schedule.actions import parse_action, parse_schedule
from plait.schedule.orders import one_f_one_b
from plait.schedule.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"
STEP = simulate(one_f_one_b(2, 2), Costs(2.0))


def test_each_pass_is_a_box_at_its_time() -> None:
    root = ET.fromstring(svg(STEP, "1f1b <2 x 2>"))
    found: Counter[tuple[str, float, float]] = Counter()
    for box in root.iter(f"{SVG}rect"):
        for title in box.iter(f"{SVG}title"):
            begin, width = (float(box.get(key, "")) * STEP.makespan / PLOT for key in ("x", "width"))
            start = begin - LEFT * STEP.makespan / PLOT
            found[(title.text or "").split(":")[0], round(start, 2), round(start + width, 2)] += 1
    actions = [one for rank in range(2) for one in STEP.line(rank)]
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
    root = ET.fromstring(svg(STEP, text))
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
