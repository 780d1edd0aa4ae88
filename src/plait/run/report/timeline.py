"""Draws a measured step, the predicted step, and the causes of the time.

    rank 0  simulated  |0F0|0F1|       |0B0  |   |0B1  |            one pair of lanes per rank, on one time scale;
            measured   |0F0|0F1|///////|0B0   |//|0B1   |           waits are hatched, what is not computing is a strip
    ...
    rank 0  simulated  [ computes         | bubble     ]            the same time by cause (idle.py)
            measured   [ computes         | bubble | ..]

``timeline_svg`` is the picture, for a light or a dark page; ``timeline_table`` says the same in a terminal.
"""

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table

from plait.run.report.drawing import COLOURS, NAMES, box_of, in_xml, rect, seconds_text, svg_file, text_in
from plait.run.report.idle import Idle, idle_times, mean_idle
from plait.run.report.measured import as_log, measured_timeline
from plait.schedule.actions import PASSES, Event, Kind, Log, Span
from plait.schedule.simulate import Timeline

CAUSES = {
    "busy": ("computes", "#a9c1d6"),
    "warm_up": ("warm-up", "#f4dc9c"),
    "bubble": ("bubble", "#ecbd55"),
    "cool_down": ("cool-down", "#d9a032"),
    "imbalance": ("imbalance", "#e2866c"),
    "knock_on": ("knock-on", "#c98aa0"),
    "communication": ("communication", "#ab97d3"),
    "update": ("update", "#8dbb9f"),
    "other": ("other", "#bdbdbd"),
}
"""The parts of ``Idle``: their names for people, and their colours."""


def summary(log: Log, simulated: Timeline | None = None) -> str:
    """A line with the step's time and the share in which ranks did not compute, measured and predicted."""
    steps = {"measured": measured_timeline(log)} | ({} if simulated is None else {"simulated": simulated})
    return "; ".join(f"{n} {seconds_text(s.makespan)}, idle {s.idle_share():.1%}" for n, s in steps.items())


def timeline_rows(log: Log, simulated: Timeline | None = None) -> list[tuple[str, ...]]:
    """A header, and rows with shares of the step: each rank's, their means, and the means of the simulated step."""
    rows = [("rank", "stages", *(name for name, _ in CAUSES.values()), "idle")]
    for rank, idle in enumerate(idle_times(log)):
        stages = sorted({event.action.stage for event in log[rank]})
        rows.append((str(rank), ", ".join(map(str, stages)), *_shares(idle)))
    means = {"all": log} | ({} if simulated is None else {"simulated": as_log(simulated)})
    return rows + [(name, "", *_shares(mean_idle(idle_times(step)))) for name, step in means.items()]


def _shares(idle: Idle) -> list[str]:
    """Each part divided by the step, and the idle total."""
    return [f"{share:.1%}" for share in (*(idle.shares[part] for part in CAUSES), 1 - idle.shares["busy"])]


def timeline_table(log: Log, simulated: Timeline | None = None) -> Table:
    """``timeline_rows`` for a terminal, under ``summary``: a column for each rank, a line for each cause there is."""
    head, *columns = timeline_rows(log, simulated)
    table = Table(title=summary(log, simulated), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name, *_ in columns:
        table.add_column(f"rank {name}" if name.isdecimal() else name, justify="right", no_wrap=True)
    for index, name in enumerate(head[1:], 1):
        cells = [column[index] for column in columns]
        if name in ("stages", "computes", "idle") or any(cell != "0.0%" for cell in cells):
            table.add_row(name, *cells)
    return table


NOTE = "a rank's later stages are paler; thin strips are messages, updates and the rest, in the colours below"

LEFT, PLOT, RIGHT, TOP = 140, 1100, 84, 62
ROW, BAR, SPACE, GAP, STRIP = 24, 16, 2, 10, 5
WIDTH = LEFT + PLOT + RIGHT

STYLE = """<style>
.ground { fill: #ffffff } .lane { fill: #eceff2 } .ink { fill: #1f2328 } .faint { fill: #59636e }
.grid { stroke: #c8d1da; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117 } .lane { fill: #252b33 } .ink { fill: #e6edf3 } .faint { fill: #a5afba }
.grid { stroke: #3d444d }
}
</style>
<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="2" height="6" fill="#8b949e" fill-opacity="0.55"/></pattern></defs>"""


def timeline_svg(log: Log, simulated: Timeline | None = None, title: str = "") -> str:
    """Draws a step.  The simulated step has the same schedule, and is in seconds as well."""
    steps = {"measured": log} if simulated is None else {"simulated": as_log(simulated), "measured": log}
    ends = {name: measured_timeline(step).makespan for name, step in steps.items()}
    idle = {name: idle_times(step) for name, step in steps.items()}
    scale, first = PLOT / (max(ends.values()) or 1.0), next(iter(steps.values()))
    out: list[str] = []
    y: float = TOP
    for rank in range(len(log)):
        for name, step in steps.items():
            share = f"idle {1 - idle[name][rank].shares['busy']:.1%}"
            out += _lane_head(y, ROW, rank, name, share, first=step is first)
            out.append(f'<rect class="lane" x="{LEFT}" y="{y:g}" width="{ends[name] * scale:.2f}" height="{ROW}"/>')
            stages = sorted({event.action.stage for event in step[rank]})
            for event in step[rank]:
                out += _event(event, y, scale, stages)
            y += ROW + SPACE
        y += GAP
    lanes_end = y - GAP
    kinds = {event.action.kind for line in log for event in line}
    passes = [(NAMES[kind], colour) for kind, colour in COLOURS.items() if kind in kinds]
    out += _legend(y + 16, [*passes, ("waits", "url(#wait)")], NOTE)
    y += 50
    out.append(f'<text class="ink" x="8" y="{y:g}" font-size="13">where the time goes, by rank</text>')
    y += 12
    for rank in range(len(log)):
        for name, step in steps.items():
            out += _lane_head(y, BAR, rank, name, "", first=step is first)
            out += _bar(idle[name][rank], y, scale)
            y += BAR + SPACE
        y += GAP / 2
    out += _legend(y + 14, list(CAUSES.values()))
    height = y + 36
    head = [
        STYLE,
        f'<rect class="ground" width="{WIDTH}" height="{height:g}"/>',
        f'<text class="ink" x="8" y="20" font-size="14">{in_xml(title)}</text>',
        f'<text class="faint" x="8" y="38">{in_xml(summary(log, simulated))}</text>',
        *_ticks(max(ends.values()), scale, lanes_end),
    ]
    return svg_file(WIDTH, height, [*head, *out])


def _lane_head(y: float, height: float, rank: int, name: str, share: str, *, first: bool) -> Iterator[str]:
    """Draws the labels left and right of a lane.  A rank's first lane has its number."""
    base = y + height / 2 + 4
    if first:
        yield f'<text class="ink" x="8" y="{base:g}" font-weight="bold">rank {rank}</text>'
    yield f'<text class="faint" x="{LEFT - 8}" y="{base:g}" text-anchor="end">{name}</text>'
    if share:
        yield f'<text class="faint" x="{LEFT + PLOT + 8}" y="{base:g}">{share}</text>'


def _event(event: Event, y: float, scale: float, stages: list[int]) -> Iterator[str]:
    """Draws an action: its waits hatched, and the rest as boxes, or as strips at the foot of the lane."""
    action, now = event.action, event.start
    cause = {Kind.UPDATE: "update", Kind.RESHARD: "other"}.get(action.kind, "communication")
    for span in (*event.waits, Span(event.end, event.end, "nothing")):
        x, worked, waited = LEFT + now * scale, span.start - now, span.end - span.start
        title = f"{action}: {seconds_text(worked)}"
        if worked > 0 and action.kind in PASSES:
            yield from box_of(action, x, y, worked * scale, ROW, stages, title)
        elif worked > 0:
            yield rect(x, y + ROW - STRIP, worked * scale, STRIP, CAUSES[cause][1], title)
        if waited > 0:
            title = f"{action} waited {seconds_text(waited)} for {span.what}"
            yield rect(LEFT + span.start * scale, y, waited * scale, ROW, "url(#wait)", title)
        now = span.end


def _bar(idle: Idle, y: float, scale: float) -> Iterator[str]:
    """Draws a rank's step by cause, with shares where they fit."""
    x = float(LEFT)
    for part, (name, colour) in CAUSES.items():
        width, share = idle.parts[part] * scale, f"{idle.shares[part]:.1%}"
        if width > 0:
            yield rect(x, y, width, BAR, colour, f"{name}: {seconds_text(idle.parts[part])}, {share}")
            yield from text_in(x, y, width, BAR, share)
            x += width


def _legend(y: float, entries: list[tuple[str, str]], note: str = "") -> Iterator[str]:
    """Draws names with their colours, in one line."""
    x = float(LEFT)
    for name, fill in entries:
        yield f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" fill="{fill}"/>'
        yield f'<text class="ink" x="{x + 20:g}" y="{y:g}">{name}</text>'
        x += 40 + 7 * len(name)
    if note:
        yield f'<text class="faint" x="{x:g}" y="{y:g}">{note}</text>'


def _ticks(end: float, scale: float, bottom: float) -> Iterator[str]:
    """Draws lines through all lanes at round times, at most ten."""
    if not end:
        return
    power = 10.0 ** math.floor(math.log10(end / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if end / (factor * power) <= 10)
    for index in range(math.floor(end / step) + 1):
        x = LEFT + index * step * scale
        yield f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 6}" y2="{bottom:g}"/>'
        text = seconds_text(index * step) if index else "0"
        yield f'<text class="faint" x="{x:.2f}" y="{TOP - 10}" text-anchor="middle">{text}</text>'
