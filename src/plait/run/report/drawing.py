"""Draws a step over time as an SVG file, with a lane for each rank.

    rank 0  |F0 |F1 |.......|B0     |          blue forward, orange backward, yellow its
    rank 1      |F0 |B0     |F1 |              input part, green its weight part, grey all else

Boxes are opaque and their text is dark, so they read the same on a light and a dark background.
"""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from plait.messages.escape import printable
from plait.schedule.actions import Action, Kind
from plait.schedule.simulate import Costs, Timeline

COLOURS = {Kind.FORWARD: "#7fb2e5", Kind.BACKWARD: "#e8a35c", Kind.INPUT: "#efc27b", Kind.WEIGHT: "#9ccc8f"}
NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input part", Kind.WEIGHT: "weight part"}
OTHERS, TEXT = "#bbbbbb", "#1f2328"
"""Colours of actions that are no passes, and of text on a box."""

LEFT, TOP, ROW, GAP, CURVE, PLOT = 140, 36, 26, 8, 18, 1100
WIDTH = LEFT + PLOT + 20


def svg(step: Timeline, title: str, costs: Costs | None = None) -> str:
    """Draws a step, with ``costs`` also the activation bytes that each rank holds, on one scale for all ranks."""
    ranks, end = range(len(step.schedule)), step.makespan
    scale, height = PLOT / (end or 1.0), ROW if costs is None else ROW + CURVE
    curves = [step.memory(rank, costs) if costs is not None and step.schedule[rank] else () for rank in ranks]
    most = max((size for curve in curves for _, size in curve), default=0.0) or 1.0
    out = [f'<text x="8" y="20" font-size="14">{_text(title)}</text>']
    y = TOP
    for rank in ranks:
        out.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{PLOT}" height="{ROW}" fill="#f2f2f2"/>')
        stages = sorted({action.stage for action in step.schedule[rank]})
        for action, start, stop in step.line(rank):
            if stop > start:
                out += _box(action, LEFT + start * scale, y, (stop - start) * scale, stages, stop - start)
        if costs is not None:
            out.append(_curve(curves[rank], end, scale, y + height, (CURVE - 3) / most))
        y += height + GAP
    out.append(f'<text x="{LEFT}" y="{y + 12}">0</text>')
    out.append(f'<text x="{LEFT + PLOT}" y="{y + 12}" text-anchor="end">{end:g}</text>')
    for number, (kind, name) in enumerate(NAMES.items()):
        x = LEFT + number * 130
        out.append(f'<rect x="{x}" y="{y + 22}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 20}" y="{y + 33}">{name}</text>')
    if costs is not None:
        out.append(f'<text x="{LEFT + 560}" y="{y + 33}">curves: activations held, at most {most:g}</text>')
    size = f'width="{WIDTH}" height="{y + 48}"'
    box = f'{size} viewBox="0 0 {WIDTH} {y + 48}" role="img"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="11">'
    return "\n".join([head, f"<title>{_text(title)}</title>", f'<rect {size} fill="white"/>', *out, "</svg>", ""])


def label(action: Action, several: bool) -> str:
    """``F3``, or ``5F3`` on a rank with several stages."""
    return str(action) if several else str(action).removeprefix(str(action.stage))


def _box(action: Action, x: float, y: float, width: float, stages: Sequence[int], took: float) -> Iterator[str]:
    """Draws an action with its name if that fits, or only its microbatch if its rank has one of ``stages``.  Later
    stages are paler."""
    colour = _paler(COLOURS.get(action.kind, OTHERS), 0.5 * stages.index(action.stage) / len(stages))
    shape = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{colour}"'
    yield f'<rect {shape} stroke="white" stroke-width="0.5"><title>{action}: {took:.4g}</title></rect>'
    texts = [label(action, len(stages) > 1)]
    texts += [str(action.microbatch)] if action.microbatch >= 0 and len(stages) == 1 else []
    for text in [text for text in texts if 7 * len(text) + 6 <= width][:1]:
        yield f'<text x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle" fill="{TEXT}">{text}</text>'


def _curve(curve: Sequence[tuple[float, float]], end: float, scale: float, base: float, unit: float) -> str:
    points, before = [], 0.0
    for time, size in {**dict(curve), end: 0.0}.items():  # of several changes at one time the last
        points += [(time, before), (time, size)]
        before = size
    path = " ".join(f"{LEFT + t * scale:.1f},{base - unit * size:.1f}" for t, size in points)
    return f'<polyline points="{path}" fill="#dfe8df" stroke="#5b8a5b"/>'


def _paler(colour: str, share: float) -> str:
    """Mixes a colour with white: 0 keeps ``#rrggbb``, 1 is white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _text(text: str) -> str:
    """Escapes a text from outside, so that it is only shown."""
    return escape(printable(text))
