"""The pictures of docs/benchmarks.md, drawn by matplotlib: the same records give the same file.

    benchmarks-goals.svg        each goal's ratio over the goal, with its range: right of the line is met
    benchmarks-collectives.svg  times faster than gloo, by size

A file's description has the digest of its numbers (``drawn.digest``), so a stale one is found without matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from summary.drawn import curves, digest, dots
from summary.page import PICTURES, label
from summary.records import Record

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:gray", "tab:olive")
STYLE = {"svg.fonttype": "none", "font.size": 8.0, "axes.spines.top": False, "axes.spines.right": False}
LINE = 0.17
"""Inches of a goal's line."""


def draw(name: str, records: Sequence[Record]) -> str:
    """One picture as SVG text."""
    make = dict(zip(PICTURES, (_goals, _collectives), strict=True))[name]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        text = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Description": f"numbers {digest(name, records)}"}
        make(records).savefig(text, format="svg", metadata=metadata, bbox_inches="tight")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _goals(records: Sequence[Record]) -> Figure:
    """A line for each goal, a dot and a range for each machine."""
    found = [dots(record) for record in records]
    names = list(dict.fromkeys((dot.suite, dot.label) for of in found for dot in of))
    figure = Figure(figsize=(9, 1 + LINE * max(1, len(names))))
    axes = figure.add_subplot()
    for number, of in enumerate(found):
        colour, shift = COLOURS[number % len(COLOURS)], 0.6 * ((number + 0.5) / len(found) - 0.5)
        heights = [names.index((dot.suite, dot.label)) + shift for dot in of]
        errors = [[dot.median - dot.low for dot in of], [dot.high - dot.median for dot in of]]
        title = f"{label(number)}, {records[number].date}"
        axes.errorbar([d.median for d in of], heights, xerr=errors, fmt="o", ms=3, lw=1, color=colour, label=title)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(names)), [f"{suite}: {text}" for suite, text in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("result over goal; right of the line the goal is met")
    axes.grid(axis="x", which="both", lw=0.3)
    if records:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
    return figure


def _collectives(records: Sequence[Record]) -> Figure:
    """A row of axes for each machine, a pair of axes for each number of ranks."""
    found = [(number, curves(record)) for number, record in enumerate(records)]
    found = [(number, of) for number, of in found if of]
    ranks = sorted({curve.ranks for _, of in found for curve in of})
    labels = sorted({curve.label for _, of in found for curve in of})
    figure = Figure(figsize=(4.6 * max(1, len(ranks)), 3.2 * max(1, len(found))), layout="constrained")
    grid = figure.subplots(max(1, len(found)), max(1, len(ranks)), squeeze=False, sharey=True)
    for (number, of), line in zip(found, grid, strict=False):
        for count, axes in zip(ranks, line, strict=True):
            for curve in (one for one in of if one.ranks == count):
                _curve(axes, curve.points, curve.label, COLOURS[labels.index(curve.label) % len(COLOURS)])
            axes.set_title(f"{label(number)}, {records[number].date}, {count} ranks")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.axhline(1, color="black", lw=0.8)
            axes.set_xlabel("bytes of the whole array")
            axes.grid(lw=0.3)
    grid[0][0].set_ylabel("times faster than gloo")
    if found:
        grid[0][0].legend(frameon=False, fontsize=6)
    return figure


def _curve(axes: Axes, points: Sequence[tuple[int, float, float, float]], name: str, colour: str) -> None:
    sizes, medians, lows, highs = zip(*points, strict=True)
    axes.plot(sizes, medians, marker="o", ms=3, lw=1, color=colour, label=name)
    axes.fill_between(sizes, lows, highs, color=colour, alpha=0.12, lw=0)
