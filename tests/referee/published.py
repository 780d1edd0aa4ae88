"""Published faults in an axis of plait's: verify has to name and place them, as docs/silent-bugs.md says."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from planted import Put
from verify_cases import found_in

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
    found, first = found_in(fault.config, fault.put)
    assert found.verdict.word == "different" and first is not None
    assert (first.step, first.phase, first.name) == (fault.step, fault.phase, fault.name), first
    assert fault.words in str(first), first
