"""What ``plait bench comm`` found, as a table, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from plait.comm.base import Comm
from plait.measure.comm import BenchConfig, Measurement, measure
from plait.measure.plot import Panel, svg


def run_bench(config: BenchConfig, comm: Comm) -> int:
    """``plait bench comm`` on one rank: measures, and rank 0 shows; returns the exit code."""
    results = measure(config, comm)
    if comm.rank:
        return 0
    answer = as_json(config, results)
    text = json.dumps(answer, indent=1) + "\n"
    console = Console(file=sys.stderr if config.json == "-" else sys.stdout)
    console.print(table(config, results))
    if config.json == "-":
        sys.stdout.write(text)
    elif config.json is not None:
        Path(config.json).write_text(text)
    if config.out is not None:
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comm.json").write_text(text)
        (folder / "comm.svg").write_text(picture(config, results))
        console.print(f"written: {folder / 'comm.json'}, {folder / 'comm.svg'}", markup=False)
    return 0


def title(config: BenchConfig) -> str:
    """What was measured, in one line."""
    return f"mesh {config.mesh}, {config.world} world, {config.device}, torch {torch.__version__}"


def table(config: BenchConfig, results: Sequence[Measurement]) -> Table:
    """A row per measurement."""
    table = Table(title=title(config), caption="time: median of the slowest rank's; algbw, busbw: 10^9 bytes/s")
    for column in ("operation", "bytes", "time", "min", "max", "algbw", "busbw"):
        table.add_column(column, justify="left" if column == "operation" else "right", no_wrap=True)
    previous = ""
    for row in results:
        if previous and row.kind != previous:
            table.add_section()
        name = row.kind if row.kind != previous else ""
        previous = row.kind
        table.add_row(
            name,
            size_text(row.bytes),
            time_text(row.seconds),
            time_text(row.seconds_min),
            time_text(row.seconds_max),
            f"{row.algbw / 1e9:.3f}",
            f"{row.busbw / 1e9:.3f}",
        )
    return table


def as_json(config: BenchConfig, results: Sequence[Measurement]) -> dict[str, Any]:
    """Everything needed to read the numbers later; bandwidths in bytes per second."""
    return {
        "command": "bench comm",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "config": dataclasses.asdict(config),
        "results": [{**dataclasses.asdict(r), "algbw": r.algbw, "busbw": r.busbw} for r in results],
    }


def picture(config: BenchConfig, results: Sequence[Measurement]) -> str:
    """Time and bus bandwidth over size, as SVG."""
    times: dict[str, list[tuple[float, float]]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    for r in results:
        times.setdefault(r.kind, []).append((r.bytes, r.seconds))
        rates.setdefault(r.kind, []).append((r.bytes, r.busbw))
    return svg(title(config), [Panel("time", "s", times), Panel("bus bandwidth", "B/s", rates)])


def size_text(size: int) -> str:
    """``16 MB`` for 2^24; units of 1024, where they come out even."""
    for power, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if size >= 1 << power:
            number = size / (1 << power)
            return f"{number:g} {unit}" if number == round(number, 2) else f"{size} B"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Three digits with a unit."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.2f} us"
