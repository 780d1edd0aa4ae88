"""A job's file is run as it is written now."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.messages.ended import EndedError
from plait.run.job.families import _states_of
from plait.run.job.user_code import load_name


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


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3),
        (lambda p: torch.optim.LBFGS(p), 2),
    ],
)
def test_what_an_own_optimizer_keeps_is_seen(make: Any, states: int) -> None:
    """It is predicted, for a user's job too."""
    assert _states_of(make(list(nn.Linear(4, 3).parameters()))) == states
