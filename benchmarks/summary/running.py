"""Runs one suite in its own process, with a deadline; its output until then counts.

A suite starts ranks, which are its children; the process has a session of its own, so that a deadline ends them all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from summary.machine import ROOT, load
from summary.records import RecordError, Row, Run, Versions, rows_in

GRACE = 10.0
"""Seconds between the word to end and the end."""


def run_suite(
    suite: str, words: Sequence[str], deadline: float, scratch: Path, versions: Versions
) -> tuple[Run, tuple[Row, ...]]:
    """Starts ``python benchmarks/WORDS --json FILE``, waits at most ``deadline`` seconds; the rows that it wrote."""
    file, before, start = scratch / f"{suite}.json", load(), time.perf_counter()
    command = [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:], "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": _path(os.environ.get("PYTHONPATH", ""))}
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        status = process.wait(deadline)
        outcome, reason = ("done", "") if status == 0 else ("failed", _reason(status))
    except subprocess.TimeoutExpired:
        outcome, reason = "stopped", f"not done in {deadline:.0f} s"
    finally:
        _end(process)
    rows: tuple[Row, ...] = ()
    if file.exists():
        try:
            rows = rows_in(file, suite)
        except RecordError as error:
            outcome, reason = "failed", reason or str(error)
    elif outcome == "done":
        outcome, reason = "failed", "wrote no rows"
    shown = " ".join(["python", f"benchmarks/{words[0]}", *(_without_folder(word) for word in words[1:])])
    seconds = round(time.perf_counter() - start, 1)
    return Run(suite, shown, outcome, reason, seconds, before, load(), versions), rows  # type: ignore[arg-type]


def _path(there: str) -> str:
    """The repository's plait before an installed one."""
    return os.pathsep.join([str(ROOT / "src"), *filter(None, [there])])


def _without_folder(word: str) -> str:
    """Results are public, but the path of an interpreter is not."""
    return Path(word).name if word.startswith("/") else word


def _reason(status: int) -> str:
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """The session ends: asked first, then made to; a rank that outlives its suite as well."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
