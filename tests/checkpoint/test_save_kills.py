"""Ranks that are killed in the middle of a save, synchronous or not, leave checkpoints that load to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = Path(__file__).with_name("kill_ranks.py")


def play(path: Path, kills: int, seed: int, timeout: float) -> list[dict[str, Any]]:
    """What was found after each kill; where a checkpoint is damaged, lost or not what was saved, it fails."""
    command = [sys.executable, "-W", "ignore", str(LAUNCHER), str(path / "run"), str(kills), str(seed)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_few_kills(tmp_path: Path) -> None:
    found = play(tmp_path, 8, 1, 200)
    assert len(found) == 8 and found[-1]["after"] > 8
    odd = [trial for trial in found if -9 not in trial["statuses"] or not 1 <= trial["whole"] <= 3]
    assert not odd, odd
    assert {trial["background"] for trial in found} == {True, False}
    assert any(trial["left"] for trial in found), "some were killed in the middle of a save"


@pytest.mark.timeout(2400)
def test_two_hundred_kills(tmp_path: Path) -> None:
    found = play(tmp_path, 200, 7, 2300)
    assert len(found) == 200
    for background in (True, False):
        mine = [trial for trial in found if trial["background"] is background]
        assert sum(trial["left"] > 0 for trial in mine) > 20
        assert {trial["operation"] is None for trial in mine} == {True, False}
