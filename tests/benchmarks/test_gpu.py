"""The benchmark of a GPU, tried on the CPU: every contestant trains the same model; what there is not is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "main.py"


def test_every_contestant_runs_and_agrees(tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--sizes", "tiny", "--rounds", "2", "--steps", "1", "--minutes", "5", "--json"]
    asked.append(str(tmp_path / "all.json"))
    ran = subprocess.run([sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "losses: all that ran agree" in ran.stdout
    turns = json.loads((tmp_path / "all.json").read_text())["sizes"]["tiny"]
    assert len(turns) == 5 and all(len(one["seconds"]) == 2 for one in turns.values())


def test_contestants_for_which_the_time_does_not_last_are_named() -> None:
    asked = ["--device", "cpu", "--sizes", "tiny", "--only", "torch", "--minutes", "0.01"]
    ran = subprocess.run([sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1 and "| torch | left out" in ran.stdout


def test_a_contestant_that_is_none_is_refused() -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT), "--only", "jax"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2 and "no contestant 'jax'" in ran.stderr


def test_a_lease_without_time_names_every_row(tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--size", "tiny", "--minutes", "0.01", "--json", str(tmp_path / "lease.json")]
    command = [sys.executable, str(SCRIPT.with_name("lease.py")), *asked]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    rows = json.loads((tmp_path / "lease.json").read_text())["rows"]
    assert ran.returncode == 1 and list(rows)[:2] == ["tiny torch", "tiny plait-zero3"]
    assert len(rows) == 12 and all("left out" in row["error"] for row in rows.values())
