"""Draws curves over sizes on logarithmic axes, as one SVG file without any library.

Panel("seconds", "s", {"all_reduce": ((4096, 1e-4), (1 << 20, 2e-3))})
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.run.report.drawing import in_xml, svg_file

COLOURS = ["#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#555555", "#a6a000", "#17becf", "#c0392b"]
WIDTH, HEIGHT = 420, 330
LEFT, TOP, RIGHT, BOTTOM = 66, 44, 14, 46
PREFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T"}


@dataclass(frozen=True)
class Panel:
    """One pair of axes; all values are above 0."""

    title: str
    unit: str
    """Unit of the values, as in "s" or "B/s"."""
    curves: Mapping[str, Sequence[tuple[float, float]]]


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Draws the panels side by side over one axis of bytes, with a legend below."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    width, columns = WIDTH * len(panels), 5
    height = HEIGHT + 24 + 20 * -(-len(names) // columns) + 12
    lines = [
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2:g}" y="18" text-anchor="middle" font-size="14">{in_xml(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        lines += [f'<g transform="translate({number * WIDTH},0)">', *_panel(panel, colour), "</g>"]
    for i, name in enumerate(names):
        x, y = 20 + (width - 40) / columns * (i % columns), HEIGHT + 24 + 20 * (i // columns)
        lines.append(
            f'<line x1="{x:g}" x2="{x + 20:g}" y1="{y}" y2="{y}" stroke="{colour[name]}" stroke-width="2"/>'
            f'<text x="{x + 26:g}" y="{y + 4}">{in_xml(name)}</text>'
        )
    return svg_file(width, height, lines, 12)


def _panel(panel: Panel, colour: Mapping[str, str]) -> Iterator[str]:
    all_points = [point for curve in panel.curves.values() for point in curve]
    if not all_points:
        return
    x_low, x_high = _range([math.log2(x) for x, _ in all_points])
    y_low, y_high = _range([math.log10(y) for _, y in all_points])
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_of(value: float) -> float:
        return LEFT + width * (math.log2(value) - x_low) / (x_high - x_low)

    def y_of(value: float) -> float:
        return TOP + height * (1 - (math.log10(value) - y_low) / (y_high - y_low))

    yield f'<text x="{LEFT + width / 2:g}" y="36" text-anchor="middle">{in_xml(panel.title)}</text>'
    yield f'<text x="{LEFT + width / 2:g}" y="{HEIGHT - 8}" text-anchor="middle">bytes</text>'
    step = 1 if x_high - x_low <= 8 else 2 if x_high - x_low <= 12 else 4
    for power in range(x_low, x_high + 1, step):
        x = x_of(2**power)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + height}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{TOP + height + 16}" text-anchor="middle">{_bytes(power)}</text>'
    for power in range(y_low, y_high + 1):
        y = y_of(10**power)
        yield f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        label = f"{_engineering(power)}{panel.unit}"
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{in_xml(label)}</text>'
    yield f'<rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}" fill="none" stroke="#888"/>'
    for name, curve in panel.curves.items():
        at = [(f"{x_of(x):.1f}", f"{y_of(y):.1f}") for x, y in curve]
        points = " ".join(map(",".join, at))
        yield f'<polyline points="{points}" fill="none" stroke="{colour[name]}" stroke-width="1.6"/>'
        yield from (f'<circle cx="{x}" cy="{y}" r="2.4" fill="{colour[name]}"/>' for x, y in at)


def _range(values: Sequence[float]) -> tuple[int, int]:
    """The whole powers that enclose all values, at least one apart."""
    low, high = math.floor(min(values)), math.ceil(max(values))
    return low, max(high, low + 1)


def _bytes(power: int) -> str:
    unit = min(max(power, 0) // 10, 3)
    return f"{2 ** (power - 10 * unit)}{('', 'K', 'M', 'G')[unit]}"


def _engineering(power: int) -> str:
    """Formats a power of ten: ``100 m`` for -1, ``10 k`` for 4."""
    prefix = 3 * (power // 3)
    return f"{10 ** (power - prefix)} {PREFIXES[prefix]}"
