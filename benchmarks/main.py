"""Runs all suites against their peers on this machine in turn; writes a results file and the page of all results.

    make bench                                         # everything: about two hours on 2 cores
    make bench ARGS=--quick                            # few rounds of rows with goals: half an hour
    python benchmarks/main.py --only collectives tensor
    python benchmarks/main.py --deepspeed ~/deepspeed/bin/python
    python benchmarks/main.py --page-only              # docs/benchmarks.md from the existing results

Each suite is its own process with a deadline.  A suite that fails or is stopped is named, and the others go on; the
exit status is then 1.  It is 2 if a requested suite does not exist, or a results file is damaged.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from summary.machine import ROOT, load, these_versions, this_machine
from summary.page import PAGE, PICTURES, page
from summary.readme import with_table
from summary.records import Record, RecordError, begun, read_all, with_run, write
from summary.running import run_suite
from summary.suites import chosen

RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Arguments:
    """Measure plait against its peers on this machine."""

    only: tuple[str, ...] = ()
    """Names of suites; empty: all."""
    quick: bool = False
    """Few rounds of rows with goals: minutes."""
    deepspeed: str = ""
    """The python of an environment that has torch and deepspeed: a suite more."""
    page_only: bool = False
    """Measure nothing: make the page of the results that are there."""
    results: Path = RESULTS
    """The folder of the results files."""
    page: bool = True
    """Make docs/benchmarks.md, its pictures and the table of the README when all is measured."""


def write_page(records: list[Record]) -> None:
    """docs/benchmarks.md, its pictures where matplotlib is installed, and the README's table."""
    docs = ROOT / "docs"
    (docs / PAGE).write_text(page(records))
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), records))
    print(f"written: docs/{PAGE}, README.md")
    try:
        from summary.plots import draw
    except ImportError as reason:
        print(f"the pictures are left as they are ({reason}): pip install 'plait[bench]', then --page-only")
        return
    for name in PICTURES:
        (docs / name).write_text(draw(name, records))
        print(f"written: docs/{name}")


def measured(arguments: Arguments) -> list[str]:
    """Runs the suites, adds each to the results as it ends; those that did not end well, with the reason."""
    suites, left_out = chosen(arguments.only, arguments.deepspeed)
    print("\n".join(left_out), end="\n" if left_out else "")
    machine, versions, date = this_machine(), these_versions(), datetime.date.today().isoformat()
    record = begun(arguments.results, machine, date)
    read_all(arguments.results)  # a damaged file is found before hours are spent
    print(f"{machine.processor}, {machine.cores} cores, {versions.commit}, load average {load()}", flush=True)
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        for suite in suites:
            print(f"\n# {suite.name}, at most {suite.seconds(arguments.quick):.0f} s", flush=True)
            words, deadline = suite.words(arguments.quick), suite.seconds(arguments.quick)
            run, rows = run_suite(suite.name, words, deadline, Path(scratch), versions)
            record = with_run(record, run, rows)
            file = write(arguments.results, record)
            print(f"\n{suite.name}: {run.outcome} in {run.seconds:.0f} s, {len(rows)} rows in {file.name}", flush=True)
            if run.outcome != "done":
                problems.append(f"{suite.name}: {run.outcome}, {run.reason}")
    return problems


def main(arguments: Arguments) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        problems = [] if arguments.page_only else measured(arguments)
        if arguments.page or arguments.page_only:
            write_page(read_all(arguments.results))
    except (RecordError, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if not arguments.page_only:
        print("\n".join(["", "not done:", *problems] if problems else ["", "all suites are done"]))
    return 1 if problems else 0


def asked_to_end(number: int, frame: object) -> None:
    """SIGTERM ends the suite that runs too, as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, asked_to_end)
    try:
        raise SystemExit(main(tyro.cli(Arguments)))
    except KeyboardInterrupt:
        print("\nbenchmarks: ended; what was measured until now is in the results", file=sys.stderr)
        raise SystemExit(130) from None
