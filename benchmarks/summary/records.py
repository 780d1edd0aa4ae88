"""A results file: one machine, one day, every suite that ran, every row that it measured.

    benchmarks/results/amd-epyc-2-cores-2026-11-23.json

Any other file is refused in one message: unknown and missing fields, other types, numbers that are not
finite, a spread whose median is outside of it, rows of a suite that did not run, another schema.  A suite that runs
again on the same day replaces its earlier run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.rows import Row
from harness.turns import Spread

SCHEMA = 1
"""Raised with every change of a field; files of another are refused."""

Outcome = Literal["done", "failed", "stopped"]
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


class RecordError(ValueError):
    """A results file that cannot be read; the message names file, place and fix."""


@dataclass(frozen=True)
class Machine:
    """The facts on which the ratios depend."""

    processor: str
    cores: int
    """That this process may use."""
    vector_units: tuple[str, ...]
    """The processor's flags that decide the speed of matrix products."""
    kernel: str


@dataclass(frozen=True)
class Versions:
    """The software's versions; ``commit`` ends in + if files differed from it."""

    plait: str
    torch: str
    python: str
    commit: str


@dataclass(frozen=True)
class Run:
    """A suite that was started."""

    suite: str
    command: str
    outcome: Outcome
    """failed: an exit status other than 0; stopped: its deadline was over. Rows written until then count."""
    reason: str
    """The text of a failure; empty if the suite is done."""
    seconds: float
    load_before: float
    """Load average of one minute: processes that ran or wanted to."""
    load_after: float
    versions: Versions


@dataclass(frozen=True)
class Record:
    """All of a file."""

    schema: int
    date: str
    machine: Machine
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]


def read_all(folder: Path) -> list[Record]:
    """Every file of the folder, by name; RecordError at the first that is none."""
    return [read(file) for file in sorted(folder.glob("*.json"))]


def read(file: Path) -> Record:
    """A results file; RecordError where it is none."""
    try:
        record: Record = made(Record, json.loads(file.read_bytes()), "")
        check(record)
    except (ValueError, RecursionError) as error:  # of the decoders too
        text = f"{file.name} is no results file of schema {SCHEMA}: {error}; run its suites again, or remove it"
        raise RecordError(text) from None
    return record


def check(record: Record) -> None:
    """Checks that types cannot express."""
    if record.schema != SCHEMA:
        raise ValueError(f"its schema is {record.schema}")
    if not DATE.fullmatch(record.date):
        raise ValueError(f"date: {record.date!r} is no YYYY-MM-DD")
    suites = [run.suite for run in record.runs]
    if twice := [suite for suite in suites if suites.count(suite) > 1]:
        raise ValueError(f"{twice[0]} ran twice")
    keys = [(row.suite, row.work, row.contestant, row.peer) for row in record.rows]
    if len(keys) != len(set(keys)):
        raise ValueError(f"a row is there twice: {next(key for key in keys if keys.count(key) > 1)}")
    for row in record.rows:
        if row.suite not in suites:
            raise ValueError(f"a row of {row.suite!r}, which did not run")
        if (row.peer is None) != (row.ratio is None):
            raise ValueError(f"{row.suite}, {row.contestant}: a peer without a ratio, or a ratio without a peer")
        for spread in (row.value, row.ratio):
            if spread is not None and not spread.low <= spread.median <= spread.high:
                raise ValueError(f"{row.suite}, {row.work}, {row.contestant}: the median is not between low and high")


def made(kind: Any, value: Any, place: str) -> Any:
    """``value``, read from JSON, as a ``kind``: dataclasses, tuples, literals, numbers, words, None among others."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{place or 'the file'} is {_shown(value)}, not an object")
        hints = typing.get_type_hints(kind)
        if odd := sorted(hints.keys() ^ value.keys()):
            raise ValueError(f"{place or 'the file'}: {odd[0]!r} is {'missing' if odd[0] in hints else 'unknown'}")
        return kind(**{name: made(hint, value[name], f"{place}.{name}".lstrip(".")) for name, hint in hints.items()})
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{place} is {_shown(value)}, not a list")
        return tuple(made(arguments[0], one, f"{place}[{number}]") for number, one in enumerate(value))
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (one for one in arguments if one is not types.NoneType)
        return made(kind, value, place)
    if origin is Literal:
        right = isinstance(value, str) and value in arguments
    elif kind is float:
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    else:
        right = isinstance(value, kind) and not isinstance(value, bool)
    if not right:
        wanted = " or ".join(map(repr, arguments)) if arguments else {float: "a finite number"}.get(kind, kind.__name__)
        raise ValueError(f"{place} is {_shown(value)}, not {wanted}")
    return float(value) if kind is float else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def rows_in(file: Path, suite: str) -> tuple[Row, ...]:
    """The rows under the key ``rows`` of a suite's output; RecordError if there are none, or another suite's."""
    try:
        found = json.loads(file.read_bytes())
        rows: tuple[Row, ...] = made(tuple[Row, ...], found["rows"] if isinstance(found, Mapping) else found, "rows")
    except (KeyError, ValueError, RecursionError) as error:
        raise RecordError(f"{suite} wrote no rows: {type(error).__name__} {error}") from None
    if others := {row.suite for row in rows} - {suite}:
        raise RecordError(f"{suite} wrote rows of {', '.join(sorted(others))}")
    return rows


def name_of(machine: Machine, date: str) -> str:
    """The file's name: processor, cores, day."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{machine.processor} {machine.cores} cores".lower()).strip("-")
    return f"{words}-{date}.json"


def with_run(record: Record, run: Run, rows: Sequence[Row]) -> Record:
    """Replaces a suite's earlier run and rows; a run without any row leaves the earlier ones."""
    if not rows and any(row.suite == run.suite for row in record.rows):
        return record
    return dataclasses.replace(
        record,
        runs=(*(r for r in record.runs if r.suite != run.suite), run),
        rows=(*(r for r in record.rows if r.suite != run.suite), *rows),
    )


def write(folder: Path, record: Record) -> Path:
    """The record as its file, renamed into place, one row a line."""
    check(record)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name_of(record.machine, record.date)
    head = dataclasses.asdict(dataclasses.replace(record, rows=()))
    del head["rows"]
    lines = ",\n".join(json.dumps(dataclasses.asdict(row)) for row in record.rows)
    text = f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'
    begun = file.with_suffix(".partial")
    begun.write_text(text)
    begun.rename(file)
    return file


def begun(folder: Path, machine: Machine, date: str) -> Record:
    """This machine's record of this day, or an empty one; RecordError if the file is not a record."""
    file = folder / name_of(machine, date)
    if not file.exists():
        return Record(SCHEMA, date, machine, (), ())
    return dataclasses.replace(read(file), machine=machine)


__all__ = ["Machine", "Record", "RecordError", "Row", "Run", "Spread", "Versions"]
