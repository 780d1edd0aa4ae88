"""A process that is killed before any of its operations on files in a save leaves checkpoints that load to the bit."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import differences
from small_runs import build, go, names, ranks, state

import plait
from plait.checkpoint.folder import checkpoints
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


def forked(folder: Path, background: bool, result: Path, operation: int | None = None) -> int:
    """``saved`` in a fork of this process, which computes nothing itself; the exit code."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        torch.save(saved(folder, background, operation), result)
        code = 0
    finally:
        os._exit(code)


def kill_before_each(place: Path, background: bool) -> None:
    """Prints a line for each operation of a third save: how it ended, and what it and a further save leave."""
    good = place / "good"
    for n in range(4):
        assert forked(good, background, place / f"state-{n}") == 0
        if n == 1:
            shutil.copytree(good, place / "two")
    for operation in itertools.count():
        folder = Path(shutil.copytree(place / "two", place / f"{operation}"))
        status = forked(folder, background, place / "killed", operation)
        for there in checkpoints(folder):
            Checkpoint.find(there).check()
        newest, left = Checkpoint.find(folder).manifest.step, any(name.startswith(".step") for name in names(folder))
        assert forked(folder, background, place / f"again-{operation}") == 0
        print(json.dumps([status, newest, left, names(folder)]), flush=True)
        if status == 0:
            return
        shutil.rmtree(folder)


@pytest.mark.parametrize("background", [True, False])
def test_a_kill_before_any_operation_loses_no_checkpoint(background: bool, tmp_path: Path) -> None:
    words = [sys.executable, __file__, str(tmp_path), "background" * background]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=os.environ | paths, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for operation, (status, newest, _, after) in enumerate(lines):
        assert status == (-signal.SIGKILL if operation < len(lines) - 1 else 0)
        again, due = (torch.load(tmp_path / name) for name in (f"again-{operation}", f"state-{newest}"))
        assert not differences(again, due), (operation, newest)
        assert after == ["latest", f"step-{newest:06}", f"step-{newest + 1:06}"]
    assert len(lines) > 20 and {newest for _, newest, *_ in lines} == {2, 3}
    assert sum(left for _, _, left, _ in lines) > 5


if __name__ == "__main__":
    torch.optim.AdamW([torch.ones(1)])  # imports once what each fork would
    kill_before_each(Path(sys.argv[1]), bool(sys.argv[2]))
