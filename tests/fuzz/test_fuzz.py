"""Random user models under random layouts, and random command lines: right, or refused with a reason.

Seeds run in separate processes, so that a seed which kills its process, or never ends, is known by its number.
"""

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


INPUTS = 50
"""The cases of a seed."""


@pytest.mark.parametrize("seed", range(48))
def test_odd_settings_are_answered(seed: int) -> None:
    script = Path(__file__).parent / "settings.py"
    command = [sys.executable, str(script), str(seed), str(INPUTS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    *wrong, last = ended.stdout.splitlines() or ["{}"]
    assert not wrong and not ended.returncode, "\n".join([*wrong, last, ended.stderr[-1000:]])
    seen = json.loads(last)["seen"]
    assert sum(seen.values()) == INPUTS
    refused = sum(number for what, number in seen.items() if what.endswith(" 2"))
    assert INPUTS / 4 < refused < INPUTS, "a fuzzer that is always or never refused shows little"
