"""The page of far hosts: predictions and measurements, as a table and a picture.

The prediction is the planner's: ``plait.predict`` lists the messages of each row and their seconds on a cluster of two
hosts.  A rank's own work and the link inside a host are measured separately; nothing is fitted to the steps.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from sizes import EVERY, GPT_SIZES, LENGTH, MESH, MICROBATCHES, ROWS

from plait.predict.cluster import PRESETS, Cluster, Link, Reached
from plait.predict.model import Transformer
from plait.predict.plan import Plan
from plait.predict.sent import elements_on, message_seconds, messages
from plait.run.models.gpt import GPTConfig
from plait.table.cells import TABLE
from plait.table.mesh import Mesh

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "far-hosts.md"
PICTURE = PAGE.with_name("far-hosts.svg")
BEGIN, END = "<!-- made by benchmarks/far_hosts/main.py -->", "<!-- made: end -->"
WIRE = 1448 / 1514 / 8e-6
"""Bytes of messages in a megabit: TCP and Ethernet take the rest."""
NAMES = {"zero3": "zero3", "hsdp": "hsdp", "psdp": "psdp", "islands": f"islands, meeting every {EVERY} steps"}
COLOURS = {"zero3": "#d1662b", "hsdp": "#1f6fb2", "psdp": "#3a8f4d", "islands": "#8b5fb0"}


def transformer() -> Transformer:
    sizes = GPTConfig(**GPT_SIZES)
    return Transformer(
        sizes.num_layers,
        sizes.width,
        sizes.hidden_width,
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.vocabulary,
        tied=True,
    )


def plan_of(row: str, mesh: Mesh, cluster: Cluster) -> Plan:
    batch = mesh.data_size * MICROBATCHES
    return Plan(
        transformer(), replace(cluster, hosts=mesh.hosts), mesh, TABLE[row], batch, LENGTH, MICROBATCHES, dtype="fp32",
        overlap=False,
    )  # fmt: skip


class Prediction:
    """Seconds of a step over a link, from a rank's own work and the links' least times, measured apart from steps."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        links = [row["links"] for row in rows]
        meet = min(one["meet"] for one in links)

        def least(name: str) -> float:
            return min(min(row["seconds"][name]) for row in rows) - meet

        self.passes, self.update = least("passes"), least("update")
        self.inside = Link(max(one["inside"] for one in links), min(one["inside_latency"] for one in links) - meet)
        self.latency = max(0.0, min(one["between_latency"] for one in links) - meet)
        self.free = links[0]["between"]

    def step(self, layout: str, bandwidth: float) -> float:
        """Seconds of a layout where a host sends so many bytes a second."""
        device = PRESETS["h100"].device  # of no account: own work is measured
        between = Link(bandwidth, self.latency)
        cluster = Cluster(
            "far", device, self.inside, between, hosts=2, devices=2, reached=Reached(network=1.0, calls=0.0)
        )
        whole = Mesh.parse(f"{MESH} hosts=2")
        mesh, row = (replace(whole, replica=1, hosts=1), "zero3") if layout == "islands" else (whole, layout)
        plan = plan_of(row, mesh, cluster)
        found = sum(one.seconds for one in messages(plan, plan.shares[0]))
        owned = 1 / mesh.count(TABLE[row].optim.split)
        if layout == "islands":
            outer = plan_of("hsdp", whole, cluster)
            size = 4 * elements_on(outer, outer.shares[0]) / whole.shard
            kinds = ("reduce_scatter", "all_gather")
            found += sum(message_seconds(kind, size, ("replica",), outer) for kind in kinds) / EVERY
        return self.passes + owned * self.update + found


def measured(row: dict[str, Any], layout: str, of: Callable[[list[float]], float]) -> float:
    """Seconds of a step; an island makes all but one of its steps apart."""
    seconds = row["seconds"]
    if layout != "islands":
        return of(seconds[layout])
    return of(seconds["apart"]) * (1 - 1 / EVERY) + of(seconds["meeting"]) / EVERY


def crossing(prediction: Prediction, slow: str, fast: str) -> float | None:
    """The Mbit/s below which ``slow`` is slower than ``fast``, by the prediction; None: it always is."""
    low, high = 1.0, 1e6
    later = lambda mbit: prediction.step(slow, mbit * WIRE) > prediction.step(fast, mbit * WIRE)  # noqa: E731
    if later(high) or not later(low):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if later(middle) else (low, middle)
    return low


def bound(prediction: Prediction, layout: str) -> float:
    """The Mbit/s at which a step takes twice its time over a link without end."""
    low, high = 0.1, 1e6
    limit = 2 * prediction.step(layout, 1e15)
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if prediction.step(layout, middle * WIRE) > limit else (low, middle)
    return low


def written(results: dict[str, Any]) -> tuple[str, str]:
    """The page's part and the picture, as text."""
    rows = results["rows"]
    prediction = Prediction(rows)
    layouts = (*ROWS, "islands")
    lines = [f"| link, Mbit/s | {' | '.join(NAMES.values())} |", "|---|" + "---|" * len(layouts)]
    wrong = []
    for row in rows:
        cells = [f"{row['mbit']:,}" if row["mbit"] else f"not shaped ({prediction.free / WIRE:,.0f})"]
        for layout in layouts:
            least, middle = measured(row, layout, min), measured(row, layout, median)
            told = prediction.step(layout, row["mbit"] * WIRE if row["mbit"] else prediction.free)
            wrong += [max(told / least, least / told)] if row["mbit"] else []
            cells.append(f"{least:.2f} ({middle:.2f}), **{told:.2f}**")
        lines.append(f"| {' | '.join(cells)} |")
    doubled = ", ".join(f"`{one}` {bound(prediction, one):,.0f}" for one in layouts)
    cross = crossing(prediction, "zero3", "hsdp")
    where = "at every speed" if cross is None else f"below {cross:,.0f} Mbit/s"
    loads = [row["load"] for row in rows]
    rounds = ", ".join(str(len(row["seconds"]["zero3"])) for row in rows)
    text = [
        *(BEGIN, "", *lines, ""),
        "Seconds of a step: the least measured (median), **predicted**. "
        f"{results['machine']}, {results['date']}, load average",
        f"{min(loads):.0f} to {max(loads):.0f}, since other programs ran beside it. "
        f"{transformer().num_parameters / 1e6:.1f}M parameters in fp32,",
        f"{MICROBATCHES} microbatches of {LENGTH} tokens on each rank. Rounds after the first: {rounds}; "
        f"of the islands, {len(rows[0]['seconds']['meeting'])} of {EVERY} steps.",
        "",
        "By the prediction, below these speeds, drawn as rings, the link takes more than half of a step (Mbit/s):",
        f"{doubled}.",
        f"By the prediction `zero3` is slower than `hsdp` {where}.",
        "Over shaped links predicted and measured differ by a factor of",
        f"{median(wrong):.2f} in the median, and of {max(wrong):.2f} at most.",
        *("", "![Seconds of a step over the speed of the link](far-hosts.svg)", "", END),
    ]
    return "\n".join(text), picture(rows, prediction)


def write(results: dict[str, Any]) -> None:
    """Writes the page's part and the picture."""
    text, drawn = written(results)
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, page, flags=re.DOTALL))
    PICTURE.write_text(drawn)


WIDE, HIGH, LEFT, BELOW, TOP = 640, 420, 56, 50, 40


def picture(rows: list[dict[str, Any]], prediction: Prediction) -> str:
    """Draws lines of the prediction and dots of the least times; the link slows to the right."""
    shaped = [row for row in rows if row["mbit"]]
    fastest, slowest = 30_000.0, min(row["mbit"] for row in shaped) / 1.5
    seconds = [measured(row, one, min) for row in rows for one in NAMES]
    most, least = max(seconds) * 1.5, min(seconds) / 1.5

    def place(mbit: float, value: float) -> tuple[float, float]:
        across = math.log(fastest / mbit) / math.log(fastest / slowest)
        up = math.log(value / least) / math.log(most / least)
        return LEFT + across * (WIDE - LEFT - 12), HIGH - BELOW - up * (HIGH - BELOW - TOP)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDE}" height="{HIGH}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">Seconds of a step as the link between two hosts slows</text>',
    ]
    for mbit in (10_000, 3_000, 1_000, 300, 100, 30):
        x, y = place(mbit, least)
        out.append(f'<line x1="{x:.0f}" y1="{TOP}" x2="{x:.0f}" y2="{y:.0f}" stroke="#eee"/>')
        out.append(f'<text x="{x:.0f}" y="{y + 16:.0f}" text-anchor="middle">{mbit:,}</text>')
    for value in (0.1, 0.3, 1, 3, 10, 30):
        if least < value < most:
            x, y = place(fastest, value)
            out.append(f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{WIDE - 12}" y2="{y:.0f}" stroke="#eee"/>')
            out.append(f'<text x="{x - 6:.0f}" y="{y + 4:.0f}" text-anchor="end">{value:g}</text>')
    for number, (layout, name) in enumerate(NAMES.items()):
        steps = [fastest * (slowest / fastest) ** (k / 80) for k in range(81)]
        path = " ".join("{:.1f},{:.1f}".format(*place(mbit, prediction.step(layout, mbit * WIRE))) for mbit in steps)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[layout]}" stroke-width="1.5"/>')
        for row in shaped:
            x, y = place(row["mbit"], measured(row, layout, min))
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[layout]}"/>')
        out.append(f'<circle cx="{LEFT + 14}" cy="{TOP + 12 + 16 * number}" r="4" fill="{COLOURS[layout]}"/>')
        out.append(f'<text x="{LEFT + 24}" y="{TOP + 16 + 16 * number}">{name}</text>')
    for layout in NAMES:
        if slowest < (mbit := bound(prediction, layout)) < fastest:
            x, y = place(mbit, prediction.step(layout, mbit * WIRE))
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="{COLOURS[layout]}"/>')
    below = "Mbit/s of the link; lines: predicted; dots: measured; rings: the link takes as long as all else"
    out.append(f'<text x="{(LEFT + WIDE) / 2}" y="{HIGH - 8}" text-anchor="middle">{below}</text>')
    return "\n".join([*out, "</svg>", ""])
