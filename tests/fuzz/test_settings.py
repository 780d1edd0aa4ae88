"""Odd settings are answered: exit code 0, 1 (not equal) or 2 with one message; no traceback, no signal, no litter.

They run in a separate process, which forks one for each input, with limits (``settings.py``).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MANY = 50  # inputs of a seed
SECONDS = 1500


@pytest.mark.parametrize("seed", range(48))
def test_odd_settings_are_answered(seed: int) -> None:
    script = Path(__file__).parent / "settings.py"
    command = [sys.executable, str(script), str(seed), str(MANY)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    *wrong, last = ended.stdout.splitlines() or ["{}"]
    assert not wrong and not ended.returncode, "\n".join([*wrong, last, ended.stderr[-1000:]])
    seen = json.loads(last)["seen"]
    assert sum(seen.values()) == MANY
    refused = sum(number for what, number in seen.items() if what.endswith(" 2"))
    assert MANY / 4 < refused < MANY, "a fuzzer that is always or never refused shows little"
