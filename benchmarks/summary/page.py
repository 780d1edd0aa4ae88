"""docs/benchmarks.md: every results file, machines side by side, each number with its goal.

Pure: records in, text out.  A line is a suite's work, contestant and peer; a column is a machine on a day.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from harness.rows import Row
from harness.turns import Spread

from summary.records import Record
from summary.verdicts import BUSY, verdict

PAGE = "benchmarks.md"
PICTURES = ("benchmarks-goals.svg", "benchmarks-collectives.svg")

TITLES = {
    "collectives": ("Collectives", "collectives"),
    "data_parallel": ("Data parallelism", "data_parallel"),
    "compiled": ("Compiled blocks", "data_parallel"),
    "tensor": ("Tensor parallelism", "tensor"),
    "dispatch": ("An operator on sharded tensors", "tensor"),
    "pipeline": ("Pipelines", "pipeline"),
    "overhead": ("The engine's own time", "overhead"),
    "checkpoint": ("Checkpoints", "checkpoint"),
    "loading": ("Loading a pretrained model", "loading"),
    "deepspeed": ("DeepSpeed", "deepspeed_peer"),
}
"""Each suite's heading, and the folder of its README."""

OPENING = """# Benchmarks

This page compares plait with its peers on every machine that has run `make bench`. `python benchmarks/main.py` makes it
from the files in `benchmarks/results` ([the suites and their methods](../benchmarks/README.md)).

A *ratio* is the peer's time (or memory) over plait's, formed inside a round in which both take a turn: 2 is twice as
fast. The table gives the median over rounds, then the lowest and highest. *met* and *missed* judge the median; *ranges
overlap* means that the goal is between the lowest and highest round, so another run may give the opposite verdict.
Milliseconds of different machines, or of different runs, are not comparable.
"""

Key = tuple[str, str, str, str | None]


def page(records: Sequence[Record]) -> str:
    """The whole page."""
    if not records:
        return f"{OPENING}\nNothing has been measured yet: `make bench`.\n"
    text = [OPENING, *_machines(records), *_goals(records)]
    for suite in suites_of(records):
        text += _suite(suite, records)
    return "\n".join(text) + "\n"


def label(number: int) -> str:
    """A column's letter."""
    return chr(ord("A") + number) if number < 26 else f"M{number}"


def suites_of(records: Iterable[Record]) -> list[str]:
    """The suites that have rows, in the page's order; unknown ones come last."""
    there = {row.suite for record in records for row in record.rows}
    return [*(suite for suite in TITLES if suite in there), *sorted(there - TITLES.keys())]


def key_of(row: Row) -> Key:
    return row.suite, row.work, row.contestant, row.peer


def is_busy(record: Record, suite: str) -> bool:
    """True if other programs used the machine when this suite began."""
    return any(run.suite == suite and run.load_before > BUSY * record.machine.cores for run in record.runs)


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    line = "| {} |".format
    return [line(" | ".join(heads)), line(" | ".join(["---"] * len(heads))), *(line(" | ".join(row)) for row in rows)]


def _machines(records: Sequence[Record]) -> list[str]:
    rows = []
    for number, record in enumerate(records):
        of = record.machine
        units = ", ".join(of.vector_units) or "none known"
        rows.append([label(number), of.processor, str(of.cores), units, of.kernel, record.date])
    text = ["## Machines\n", *table_of(["", "processor", "cores", "vector units", "kernel", "date"], rows), ""]
    runs = []
    for number, record in enumerate(records):
        for run in record.runs:
            of = run.versions
            ended = run.outcome if run.outcome == "done" else f"**{run.outcome}**: {_cell(run.reason)}"
            load = f"{run.load_before:.1f}, {run.load_after:.1f}" + (" *busy*" if is_busy(record, run.suite) else "")
            versions = f"plait {of.plait} ({of.commit}), torch {of.torch}, Python {of.python}"
            runs.append([label(number), run.suite, load, f"{run.seconds:.0f} s", ended, versions])
    heads = ["", "suite", "load before, after", "took", "ended", "with"]
    commands = [(label(n), run.suite, run.command) for n, record in enumerate(records) for run in record.runs]
    return [
        *text,
        "A suite leaves a load average of about the number of cores to the next one. More than one and a "
        "half times the cores before a suite (*busy*) means that other programs ran. Ranges are wide then, and "
        "a verdict is only a hint: measure on an idle machine.\n",
        *table_of(heads, runs),
        "",
        *(f"- {where}, {suite}: `{_cell(command)}`" for where, suite, command in commands),
        "",
    ]


def _goals(records: Sequence[Record]) -> list[str]:
    text = ["## Goals\n", f"![Every goal's ratio over the goal]({PICTURES[0]})\n"]
    for number, record in enumerate(records):
        judged = [(row, found) for row in record.rows if (found := verdict(row)) is not None]
        counts = Counter((found.word, found.open) for _, found in judged)
        met, missed = (counts[word, False] + counts[word, True] for word in ("met", "missed"))
        text.append(
            f"**{label(number)}, {record.date}: {met} of {len(judged)} goals met, {missed} missed.** The range has the "
            f"goal inside for {counts['met', True]} of those met and {counts['missed', True]} of those missed.\n"
        )
        text += _missed([row for row, found in judged if found.word == "missed"])
    return text


def _missed(rows: Sequence[Row]) -> list[str]:
    """The missed goals, by suite."""
    if not rows:
        return []
    heads = ["missed: suite", "work", "row", "against", "goal", "found"]
    return [*table_of(heads, [[row.suite, row.work, *_names(row), _goal(row), _found(row)] for row in rows]), ""]


def _names(row: Row) -> tuple[str, str]:
    """The contestant and the peer; words stay words, names are code."""
    contestant, peer = (name if " " in name else f"`{name}`" for name in (row.contestant, row.peer or " "))
    return contestant, peer.strip()


def _found(row: Row) -> str:
    """The median, the range, and whether the goal is inside."""
    of = row.value if row.ratio is None else row.ratio
    found = verdict(row)
    overlap = ", ranges overlap" if found is not None and found.open else ""
    return f"{_number(of.median)} ({_range(of)}){overlap}"


def _suite(suite: str, records: Sequence[Record]) -> list[str]:
    title, folder = TITLES.get(suite, (suite, ""))
    text = [f"## {title}\n"]
    if folder:
        text.append(f"[Contestants and method](../benchmarks/{folder}/README.md).\n")
    if suite == "collectives":
        text.append(f"![Times faster than gloo, by size]({PICTURES[1]})\n")
    with_rows = [
        (n, {key_of(row): row for row in record.rows if row.suite == suite}) for n, record in enumerate(records)
    ]
    every = [{key_of(row): row for row in record.rows if row.suite == suite} for record in records]
    with_rows = [(number, rows) for number, rows in enumerate(every) if rows]
    keys: dict[Key, Row] = {}
    for _, rows in with_rows:
        for key, row in rows.items():
            if row.peer is not None or row.goal is not None:
                keys.setdefault(key, row)
    columns = [label(n) + (" *busy*" if is_busy(records[n], suite) else "") for n, _ in with_rows]
    works = list(dict.fromkeys(work for _, work, _, _ in keys))
    body = []
    for key, row in sorted(keys.items(), key=lambda item: works.index(item[0][1])):
        cells = [_result(rows[key]) if key in rows else "" for _, rows in with_rows]
        body.append([row.work, *_names(row), _goal(row), *cells])
    return [*text, *table_of(["work", "row", "against", "goal", *columns], body), ""]


def _result(row: Row) -> str:
    """The ratio, its range, the verdict, the contestant's own time."""
    of = row.value if row.ratio is None else row.ratio
    found = verdict(row)
    judged = "" if found is None else f" **{found.word}**{', ranges overlap' if found.open else ''}"
    if row.ratio is None:
        return f"{_number(of.median)} {_unit(row)} ({_range(of)}){judged}"
    return f"{_number(of.median)} ({_range(of)}){judged}; {_number(row.value.median)} {_unit(row)}"


def _range(of: Spread) -> str:
    return f"{_number(of.low)} - {_number(of.high)}"


def _goal(row: Row) -> str:
    """At least so many times as fast, or at most so much."""
    if row.goal is None:
        return ""
    return f"{row.goal:g}" if row.peer else f"at most {row.goal:g} {_unit(row)}"


def _unit(row: Row) -> str:
    return {"us": "µs"}.get(row.unit, row.unit)


def _number(value: float) -> str:
    """Three digits or so."""
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}" if abs(value) >= 1e-4 else f"{value:.0e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
