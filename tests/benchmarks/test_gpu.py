"""The GPU benchmark, tried on the CPU: every contestant trains the same model; missing parts are refused."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script of a lease, which has imported that of the contestants."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("decoders", "main", "lease")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("lease")
    for name in names:
        sys.modules.pop(name, None)


def test_every_contestant_runs_and_agrees(tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--sizes", "tiny", "--rounds", "2", "--steps", "1", "--minutes", "5", "--json"]
    asked.append(str(tmp_path / "all.json"))
    ran = subprocess.run([sys.executable, str(FOLDER / "main.py"), *asked], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "losses: all that ran agree" in ran.stdout
    turns = json.loads((tmp_path / "all.json").read_text())["sizes"]["tiny"]
    assert len(turns) == 5 and all(len(one["seconds"]) == 2 for one in turns.values())


def test_what_there_is_no_time_for_is_named_and_what_is_none_refused(
    lease: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, file = lease.contestants, tmp_path / "lease.json"
    assert main.main(main.Arguments(device="cpu", sizes=("tiny",), only=("torch",), minutes=0.01)) == 1
    assert "| torch | left out" in capsys.readouterr().out
    assert main.main(main.Arguments(only=("jax",))) == 2 and "no contestant 'jax'" in capsys.readouterr().err
    assert lease.main(lease.Arguments(device="cpu", size="tiny", minutes=0.01, json=file)) == 1
    rows = json.loads(file.read_text())["rows"]
    assert list(rows)[:2] == ["tiny torch", "tiny plait-zero3"]
    assert len(rows) == 12 and all("left out" in row["error"] for row in rows.values())
