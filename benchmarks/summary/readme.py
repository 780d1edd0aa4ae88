"""The table of the README's section on speed: a few rows of the latest day."""

from __future__ import annotations

from collections.abc import Sequence

from harness.rows import Row

from summary.page import is_busy, key_of, label, table_of
from summary.records import Record
from summary.verdicts import verdict

START, END = "<!-- speed: made by benchmarks/main.py -->", "<!-- speed: end -->"
THREE = {"mlp4": "4-layer MLP", "mlp16": "16-layer MLP", "gpt256": "8-layer GPT"}
LINES: tuple[tuple[str, str, str, str], ...] = (
    ("`ddp` against the fastest torch DDP", "data_parallel", "plait/shm-ddp", "fastest DDP"),
    ("`zero1` against the fastest torch DDP", "data_parallel", "plait/shm-zero1", "fastest DDP"),
    ("`zero3` against FSDP2", "data_parallel", "plait/shm-zero3", "fsdp2"),
    ("`zero3` against ranks that never talk", "data_parallel", "plait/shm-zero3", "local"),
    ("over gloo: `ddp` against the fastest torch DDP", "data_parallel", "plait-ddp", "fastest DDP"),
    ("over gloo: `zero3` against FSDP2", "data_parallel", "plait-zero3", "fsdp2"),
    ("`tensor=2` against torch's fastest plan", "tensor", "plait/shm-tensor", "torch's fastest plan"),
    ("`pipe=2` against torch's best order", "pipeline", "plait/shm, best order", "torch's best order"),
)
"""Words, suite, contestant, peer."""


def readme_table(records: Sequence[Record]) -> str:
    """Times as fast on two ranks, of the latest day: median, lowest and highest round; the goal follows a median that
    misses it."""
    for number, record in sorted(enumerate(records), key=lambda one: one[1].date, reverse=True):
        found = {key_of(row): row for row in record.rows}
        body = []
        for words, suite, contestant, peer in LINES:
            rows = [found.get((suite, f"{model}, 2 ranks", contestant, peer)) for model in THREE]
            if any(rows):
                body.append([words, *("" if row is None else _short(row) for row in rows)])
        if body:
            return "\n".join([f"{_head(number, record)}\n", *table_of(["", *THREE.values()], body)])
    return "Nothing has been measured yet."


def with_table(readme: str, records: Sequence[Record]) -> str:
    """The README with the table between its two marks; ValueError where they are not there."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"README.md lacks {START} and {END} around the table of its section on speed")
    return f"{before}{START}\n\n{readme_table(records)}\n\n{END}{after}"


def _head(number: int, record: Record) -> str:
    """The machine, the day, and whether it was used by others."""
    has, of = record.machine.vector_units, record.machine
    units = "AVX-512" if "avx512f" in has else "AVX2" if "avx2" in has else ""
    where = ", ".join(filter(None, [of.processor, f"{of.cores} cores", units, record.date]))
    shown = {suite for _, suite, _, _ in LINES}
    loads = [run.load_before for run in record.runs if run.suite in shown and is_busy(record, run.suite)]
    note = f"; other programs took part (load average up to {max(loads):.0f}), so these are hints" if loads else ""
    return f"{where}{note}. {label(number)} in [docs/benchmarks.md](docs/benchmarks.md#machines):"


def _short(row: Row) -> str:
    """The median and the range, and the goal where it is missed."""
    assert row.ratio is not None
    found = verdict(row)
    goal = f", goal {row.goal:g}" if found is not None and found.word == "missed" else ""
    return f"{row.ratio.median:.2f} ({row.ratio.low:.2f} - {row.ratio.high:.2f}){goal}"
