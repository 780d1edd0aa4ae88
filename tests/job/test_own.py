"""A job's file is run as it is written now."""

import os
import sys
from pathlib import Path

import pytest

from plait.core.ended import EndedError
from plait.job.own import load_name


def test_a_file_that_was_edited_within_a_second_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "job.py"
    for value in (1, 2):
        file.write_text(f"number = {value}\n")
        os.utime(file, (1_000_000_000, 1_000_000_000))  # the same second, the same size
        assert load_name(f"{file}:number", "job") == value
    assert not (tmp_path / "__pycache__").exists(), "nothing is left beside the user's file"


def test_a_file_that_ends_the_program_is_no_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(EndedError, match=r"job\.py:2 ended the program in <module> \(SystemExit: 0\)"):
        load_name(f"{tmp_path}/job.py:job", "job")
