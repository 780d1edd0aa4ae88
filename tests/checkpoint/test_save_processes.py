"""Processes that are killed in the middle of a save leave a newest checkpoint that loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from ports import free_port

RANKS = Path(__file__).with_name("save_ranks.py")


def play(path: Path, phase: str) -> list[tuple[int, str]]:
    """Exit status and output of each of three ranks."""
    port = free_port()
    processes = []
    for rank in range(3):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", str(RANKS), str(path), phase]
        processes.append(
            subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    return [(process.wait(), output) for process in processes for output in [process.communicate(timeout=90)[0]]]


def test_a_save_that_is_killed_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert [status for status, _ in play(path, "all")] == [0, 0, 0]
    for phase, newest in (("writing", 1), ("written", 1), ("renamed", 1), ("all", 2)):
        ranks = play(path, phase)
        assert all(f"loaded {newest}" in output for _, output in ranks), ranks
        assert any(status == -9 for status, _ in ranks) == (phase != "all"), ranks
        assert all(status for status, _ in ranks) == (phase != "all"), "all hear of it"
        left = [entry.name for entry in path.iterdir() if entry.name.startswith(".step")]
        assert bool(left) == (phase == "written"), "rank 0 takes it away, or the next save does"
    folders = sorted(entry.name for entry in path.iterdir() if re.fullmatch(r"step-\d+", entry.name))
    assert folders == ["step-000001", "step-000002", "step-000003"]
    assert (path / "latest").read_text() == "step-000003\n"
