"""Shows the measurements of ``plait bench comm`` as a table with a plot of the bandwidths, and as JSON."""

import datetime
import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby

import torch
from rich.bar import Bar
from rich.table import Table

from plait.checkpoint.files.writing import write_json
from plait.comm.base import Comm
from plait.messages.wording import human, seconds_text
from plait.run.config.machine import resolve_device, resolve_world
from plait.run.launch.local import launch
from plait.run.measure.comm import BenchConfig, Measurement, measure, validate
from plait.run.report.screen import empty_table, screen


def run(config: BenchConfig, argv: Sequence[str]) -> int:
    validate(config)
    return launch(config, partial(run_bench, config), ["-m", "plait", *argv])


def run_bench(config: BenchConfig, comm: Comm) -> int:
    """Runs ``plait bench comm`` on one rank and returns the exit code.  Rank 0 shows the results."""
    results = measure(config, comm)
    if comm.rank:
        return 0
    screen(stderr=config.json == "-").print(table(config, results))
    answer = {
        "command": "bench comm",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "config": asdict(config),
        "results": [{**asdict(r), "algbw": r.algbw, "busbw": r.busbw} for r in results],
    }
    write_json(config.json, answer)
    return 0


def table(config: BenchConfig, results: Sequence[Measurement]) -> Table:
    """A table with one row per measurement; the last column plots busbw."""
    title = f"mesh {config.mesh}, {resolve_world(config)} world, {resolve_device(config)}, torch {torch.__version__}"
    heads = ("operation", "bytes", "time", "min", "max", "algbw", "busbw")
    caption = "time: median of the slowest rank's; algbw, busbw: 10^9 bytes/s"
    table = empty_table(title, *heads, left=heads[:1], caption=caption, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("plot", width=8)
    fastest = max(row.busbw for row in results)
    for kind, rows in groupby(results, lambda row: row.kind):
        for number, row in enumerate(rows):
            times = map(seconds_text, (row.seconds, row.seconds_min, row.seconds_max))
            rates = (f"{rate / 1e9:.3f}" for rate in (row.algbw, row.busbw))
            bar = Bar(fastest, 0, row.busbw)
            table.add_row("" if number else kind, human(row.bytes), *times, *rates, bar)
        table.add_section()
    return table
