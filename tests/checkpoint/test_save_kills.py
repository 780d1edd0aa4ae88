"""A process that is killed before any of its operations on files in a save leaves checkpoints that load to the bit."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from run_cases import differences
from small_runs import build, go, names, ranks, state

import plait
from plait.checkpoint.places import checkpoints
from plait.checkpoint.stored import Checkpoint
from plait.comm import Comm

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}


def saved(folder: Path, background: bool, operation: int | None = None) -> Any:
    """Goes on from the newest checkpoint for a step and saves it; the process dies before the n-th operation."""

    def body(comm: Comm) -> Any:
        engine = build(comm)
        if checkpoints(folder):
            plait.load(folder, engine)
        go(engine)
        saver = plait.Saver(folder, engine, keep=2, background=background)
        if operation is not None and not comm.rank:
            arm(operation)
        saver.save()
        saver.wait()
        return state(engine)

    return ranks(body, 2)[0]


def arm(operation: int) -> None:
    """Kills this process before its n-th operation on files from now on."""
    left = itertools.count(operation, -1)

    def hook(event: str, arguments: Any) -> None:
        if event in OPERATIONS and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("background", [True, False])
def test_a_kill_before_any_operation_loses_no_checkpoint(background: bool, tmp_path: Path) -> None:
    states = [saved(tmp_path / "good", background) for _ in range(4)]
    good = tmp_path / "good"
    shutil.rmtree(good)
    for _ in range(2):
        saved(good, background)
    ends, left = set[int](), 0
    for operation in itertools.count():
        folder = Path(shutil.copytree(good, tmp_path / f"{operation}"))
        if not (child := os.fork()):
            saved(folder, background, operation)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for there in checkpoints(folder):
            Checkpoint.find(there).check()
        newest = Checkpoint.find(folder).manifest.step
        ends.add(newest)
        left += any(name.startswith(".step") for name in names(folder))
        again = saved(folder, background)
        assert not differences(again, states[newest]), (operation, newest)
        assert names(folder) == ["latest", f"step-{newest:06}", f"step-{newest + 1:06}"]
        if status == 0:
            break
        assert status == -signal.SIGKILL
        shutil.rmtree(folder)
    assert operation > 20 and ends == {2, 3} and left > 5
