"""Published faults in an axis of plait's: verify has to name and place them, as docs/silent-bugs.md says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import verify_cases as cases
from planted import Put

from plait.referee.verify.locate import first_step, search, window_of
from plait.referee.verify.record import trace_layout
from plait.referee.wrong import FirstWrong
from plait.run.config.settings import VerifyConfig

PAGE = (
    (Path(__file__).parents[2] / "docs/silent-bugs.md").read_text(encoding="utf-8").split("## Context and experts")[1]
)


@dataclass(frozen=True)
class Fault:
    """A fault, the layout that runs with it, its threads, the place that verify has to name, a part of what it says.

    Without a phase it is an error with these words.
    """

    put: Put
    config: VerifyConfig
    threads: str
    phase: str
    name: str
    words: str
    step: int = 0


def found_in(config: VerifyConfig, put: Put | None) -> tuple[str, FirstWrong | None]:
    """Verify's word, and the first wrong tensor, of a layout that runs with a fault; the replay runs without it."""
    job = cases.job_of(config)

    def broken(run: Callable[[], Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if put is not None:
                put(patch)
            return run()

    verdict = cases.judged(config, broken(lambda: cases.record(config, job))).verdict
    window = window_of(first_step(verdict.tree))
    traces = broken(lambda: trace_layout(job, config, window))
    return verdict.word, search(traces, job, config, window)


def check_page(threads: str, words: str) -> None:
    """Asserts that the row of these threads has these words."""
    rows = [line for line in PAGE.splitlines() if all(f"[{t}]" in line for t in threads.split(", "))]
    assert any(words in row for row in rows), (words, rows)


def check(fault: Fault) -> None:
    """Asserts that a fault is named and placed, and that the page says so."""
    check_page(fault.threads, fault.words)
    if not fault.phase:
        with pytest.raises((ValueError, FloatingPointError)) as raised:
            found_in(fault.config, fault.put)
        assert fault.words in str(raised.value)
        return
    word, first = found_in(fault.config, fault.put)
    assert word == "different" and first is not None
    assert (first.step, first.phase, first.name) == (fault.step, fault.phase, fault.name), first
    assert fault.words in str(first), first
