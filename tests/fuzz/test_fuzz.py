"""Random user models under random layouts: right, or refused with a reason; never wrong, unclear, dead or late.

Seeds run in separate processes, so that a seed which kills its process, or never ends, is known by its number.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MANY = 25  # seeds in a process
SECONDS = 200


@pytest.mark.parametrize("first", range(0, 1000, MANY))
def test_random_models_are_right_or_refused(first: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), str(first), str(first + MANY)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        printed, said = ended.stdout, f"exit code {ended.returncode}: {ended.stderr[-1000:]}"
    except subprocess.TimeoutExpired as late:
        printed, said = (late.stdout or b"").decode(), f"no end after {SECONDS} s"
    lines = [json.loads(line) for line in printed.splitlines()]
    began = [line["began"] for line in lines if "began" in line]
    outcomes = [line for line in lines if "verdict" in line]
    assert len(outcomes) == MANY, f"seed {began[-1:]}: {said}"
    bad = [line for line in outcomes if line["verdict"] in ("wrong", "unclear")]
    assert not bad, "\n".join(
        f"seed {b['seed']}: {b['verdict']}, {b['reason']} ({b['parts']}, {b['layout']})" for b in bad
    )
    assert sum(line["verdict"] == "right" for line in outcomes) > MANY / 3, (
        "a fuzzer that is always refused shows little"
    )
