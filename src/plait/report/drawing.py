"""What drawings of timelines share: the colours of the passes, and the box of an action with its name.

    |F0 |F1 |.......|B0     |        blue forward, orange backward, yellow its input part, green its weight part

Boxes are opaque and their text is dark, so they read the same on a light and a dark background.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from plait.schedule.actions import Action, Kind

COLOURS = {
    Kind.FORWARD: "#7fb2e5",
    Kind.BACKWARD: "#e8a35c",
    Kind.INPUT: "#efc27b",
    Kind.WEIGHT: "#9ccc8f",
}
OTHER = "#bbbbbb"
NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input part", Kind.WEIGHT: "weight part"}
TEXT = "#1f2328"
"""Of text on a colour."""


def label(action: Action, several: bool) -> str:
    """``F3``, or ``5F3`` on a rank with several stages."""
    return str(action) if several else str(action).removeprefix(str(action.stage))


def seconds_text(seconds: float) -> str:
    """Three digits with a unit: ``12.3 ms``."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def paler(colour: str, share: float) -> str:
    """A colour mixed with white; 0 leaves ``#rrggbb`` as it is, 1 is white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def box_of(
    action: Action, x: float, y: float, width: float, height: float, stages: Sequence[int], title: str = ""
) -> list[str]:
    """A pass; a rank's later stages are paler.  Where its name does not fit, its microbatch may.

    Args:
        stages: those of the rank, in order.
        title: shown where the pointer rests; the action if nothing else is given.
    """
    texts = (label(action, len(stages) > 1), str(action.microbatch) if action.microbatch >= 0 else "")
    colour = paler(COLOURS.get(action.kind, OTHER), 0.5 * stages.index(action.stage) / len(stages))
    shape = (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{colour}" stroke="white" '
        f'stroke-width="0.5"><title>{escape(title or str(action))}</title></rect>'
    )
    text = next((text for text in texts if 7 * len(text) <= width), "")
    if not text:
        return [shape]
    middle = f'x="{x + width / 2:.2f}" y="{y + height / 2 + 4:g}" text-anchor="middle"'
    return [shape, f'<text {middle} fill="{TEXT}">{escape(text)}</text>']
