"""What somebody has made to do harm is refused, whatever it says, and nothing is opened, allocated or changed by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FUZZER = Path(__file__).with_name("hostile.py")
SECONDS = float(os.environ.get("PLAIT_FUZZ_SECONDS", "300"))


def played(seconds: float, seed: int) -> dict[str, Any]:
    """In a process of its own, whose memory is bounded."""
    command = [sys.executable, "-W", "ignore", str(FUZZER), str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * seconds + 100, env=dict(os.environ))
    told: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"wrong": done.stderr}
    assert not told["wrong"], told
    return told


def test_a_few_seconds_of_harm() -> None:
    assert played(4, 0)["cases"]


@pytest.mark.timeout(2 * SECONDS + 100)
def test_long_harm() -> None:
    """``PLAIT_FUZZ_SECONDS=3600`` makes it an hour; seeds that were never played come with the time."""
    assert played(SECONDS, 1_000_000)["cases"] > SECONDS / 2
