"""Writes docs/planner.md and its plots from what was judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape

from cases import Source
from judge import Errors, Fits, Picked

from plait.predict.cluster import Reached


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [" | ".join(headings), " | ".join(["---"] * len(headings))]
    lines += [" | ".join(map(str, row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def goal(value: float, most: float) -> str:
    """Says whether a goal was met."""
    return f"{percent(value)} {'met' if value <= most else 'missed'}"


def kinds(groups: dict[str, dict[str, Errors]]) -> str:
    """A table of the errors by the kind of a row."""
    rows = [(kind, name, len(one.values), one) for kind, names in groups.items() for name, one in names.items()]
    return table(("kind", "value", "rows", "mean %", "median %", "bias %"), rows)


def constants(sets: dict[str, Reached]) -> str:
    """A table of the fitted constants."""
    names = [field.name for field in fields(Reached)]
    rows = [(name, *(f"{getattr(one, name):.3g}" for one in sets.values())) for name in names]
    return table(("constant", *sets), rows)


def picked(found: dict[str, Picked]) -> str:
    """A table of the layouts that the planner would have picked."""
    rows = [
        (name, one.runs, *(f"{100 * share:.0f}" for share in (one.first, one.of_three, one.middle)))
        for name, one in found.items()
    ]
    return table(("question", "runs", "first %", "best of three %", "median run %"), rows)


def left_out(sources: Sequence[Source]) -> str:
    """A table of the rows that are not judged."""
    rows = [(source.name, count, reason) for source in sources for reason, count in source.left_out.items()]
    return table(("file", "rows", "not judged because"), rows)


def fits(found: Fits) -> str:
    said = f"{found.said_yes:,} of {found.measured:,} runs that ran ({percent(found.said_yes / found.measured)})"
    no = f"{found.said_no:,} of {found.failed:,} runs that failed ({percent(found.said_no / found.failed)})"
    return f"Said to fit: {said}. Said not to fit: {no}."


COLOURS = ("#1f6fb2", "#d1662b", "#3a8f4d", "#8b5fb0", "#b0413e", "#6b7280")
WIDE, HIGH, LEFT, BELOW = 560, 420, 60, 46


def scatter(title: str, unit: str, groups: dict[str, Sequence[tuple[float, float]]]) -> str:
    """An SVG of predicted over measured, both on logarithmic scales, a colour for each group."""
    points = [one for group in groups.values() for one in group]
    low = math.floor(math.log10(min(min(one) for one in points)))
    high = math.ceil(math.log10(max(max(one) for one in points)))

    def place(measured: float, predicted: float) -> tuple[float, float]:
        across = (math.log10(measured) - low) / (high - low) * (WIDE - LEFT - 10)
        up = (math.log10(predicted) - low) / (high - low) * (HIGH - BELOW - 30)
        return LEFT + across, HIGH - BELOW - up

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" font-family="sans-serif" '
           f'font-size="12"><rect width="{WIDE}" height="{HIGH}" fill="white"/>',
           f'<text x="{LEFT}" y="16" font-size="14">{escape(title)}</text>']  # fmt: skip
    (x0, y0), (x1, y1) = place(10.0**low, 10.0**low), place(10.0**high, 10.0**high)
    out.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="#999"/>')
    for power in range(low, high + 1):
        x, y = place(10.0**power, 10.0**power)
        out.append(f'<line x1="{x:.0f}" y1="{y0}" x2="{x:.0f}" y2="{y1}" stroke="#eee"/>')
        out.append(f'<line x1="{x0}" y1="{y:.0f}" x2="{x1}" y2="{y:.0f}" stroke="#eee"/>')
        out.append(f'<text x="{x:.0f}" y="{y0 + 16}" text-anchor="middle">{10.0**power:g}</text>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>')
    out.append(f'<text x="{(x0 + x1) / 2}" y="{HIGH - 6}" text-anchor="middle">measured, {escape(unit)}</text>')
    out.append(f'<text x="14" y="{(y0 + y1) / 2}" transform="rotate(-90 14 {(y0 + y1) / 2})" text-anchor="middle">'
               f"predicted, {escape(unit)}</text>")  # fmt: skip
    for (name, group), colour in zip(groups.items(), COLOURS, strict=False):
        for measured, predicted in group[:: max(1, len(group) // 400)]:
            x, y = place(measured, predicted)
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{colour}" fill-opacity="0.6"/>')
        y = 34 + 16 * list(groups).index(name)
        out.append(f'<circle cx="{LEFT + 10}" cy="{y}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 20}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])
