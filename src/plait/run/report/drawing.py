"""Shared parts of the drawings: the file, boxes and their texts, the colours of the passes.

    |F0 |F1 |.......|B0     |        blue forward, orange backward, yellow its input part, green its weight part

Boxes are opaque and their text is dark, so they read the same on a light and a dark background.
"""

from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

from plait.messages.escape import printable
from plait.schedule.actions import Action, Kind

COLOURS = {Kind.FORWARD: "#7fb2e5", Kind.BACKWARD: "#e8a35c", Kind.INPUT: "#efc27b", Kind.WEIGHT: "#9ccc8f"}
NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input part", Kind.WEIGHT: "weight part"}
TEXT = "#1f2328"
"""Colour of text on a coloured box."""


def label(action: Action, several: bool) -> str:
    """``F3``, or ``5F3`` on a rank with several stages."""
    return str(action) if several else str(action).removeprefix(str(action.stage))


def seconds_text(seconds: float) -> str:
    """Formats seconds in three digits with a unit: ``12.3 ms``."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def paler(colour: str, share: float) -> str:
    """Mixes a colour with white: 0 keeps ``#rrggbb``, 1 is white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def in_xml(text: str) -> str:
    """Escapes a text for a picture, so that it is only shown."""
    return escape(printable(text))


def svg_file(width: float, height: float, lines: Iterable[str], letters: int = 11) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{letters}">'
    return "\n".join([head, *lines, "</svg>", ""])


def rect(x: float, y: float, width: float, height: float, fill: str, title: str, more: str = "") -> str:
    """Draws a box that shows its title under the pointer.  ``more`` are other attributes."""
    shape = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}"{more}'
    return f"<rect {shape}><title>{in_xml(title)}</title></rect>"


def text_in(x: float, y: float, width: float, height: float, *texts: str) -> Iterator[str]:
    """Draws the first text that fits into a box with a margin, if any does, in its middle."""
    for text in texts:
        if 7 * len(text) + 6 <= width:
            middle = f'x="{x + width / 2:.2f}" y="{y + height / 2 + 4:g}" text-anchor="middle"'
            yield f'<text {middle} fill="{TEXT}">{in_xml(text)}</text>'
            return


def box_of(
    action: Action, x: float, y: float, width: float, height: float, stages: Sequence[int], title: str = ""
) -> Iterator[str]:
    """Draws a pass with its name if that fits, or only its microbatch if its rank has one of ``stages``.  Later stages
    are paler."""
    colour = paler(COLOURS.get(action.kind, "#bbbbbb"), 0.5 * stages.index(action.stage) / len(stages))
    yield rect(x, y, width, height, colour, title or str(action), ' stroke="white" stroke-width="0.5"')
    microbatch = (str(action.microbatch),) if action.microbatch >= 0 and len(stages) == 1 else ()
    yield from text_in(x, y, width, height, label(action, len(stages) > 1), *microbatch)
