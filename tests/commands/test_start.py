"""The start of a command: the modules that it imports, their folders, and Ctrl-C meanwhile."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from traps import EVERY, Traps
from waiting import wait_for

from plait.run.commands.main import COMMANDS, main

PLAIT = [str(Path(sys.executable).with_name("plait"))]
MODULE = [sys.executable, "-m", "plait"]
MLP = "--model mlp --steps 1 --batch 4"

JOB = """
import os, subprocess, sys, torch, plait, beside
helper = os.path.join(os.path.dirname(__file__), "helper.py")
subprocess.run([sys.executable, helper], env={**os.environ, "PYTHONSAFEPATH": ""}, check=True)
ranks = lambda comm: comm.rank
job = plait.UserJob(lambda: torch.nn.Linear(2, 1), lambda model, x: beside.loss(model(x)), [torch.ones(4, 2)])
"""

STARTED = {
    "train": [
        f"train {MLP} --mesh shard=2 --workers 1",
        "train --job jobs/mine.py:job --steps 1 --mesh shard=2",
        f"train {MLP} --mesh shard=1 --workers 1 --world thread",
    ],
    "verify": [f"verify {MLP} --mesh shard=2 --world process", f"verify {MLP} --mesh shard=2 --world thread"],
    "prove": ["prove --mesh shard=2 --layers 2 --width 8 --heads 2 --vocab 8"],
    "plan": ["plan --layers 2 --width 8 --heads 2 --vocab 8"],
    "doctor": ["doctor"],
    "bench": ["bench comm --mesh shard=2 --sizes 1KB --repeat 1"],
    "schedule": ["schedule show 1f1b"],
    "explain": ["explain"],
    "checkpoint": ["checkpoint verify run"],
    "judge": ["judge run"],
    "submit": ["submit slurm --dry-run -- prove --mesh shard=1"],
    "lesson": ["lesson list", "lesson run 2"],
    "trace": ["trace jobs/mine.py:ranks --mesh shard=2"],
    "report": ["report run run"],
}
"""Words of each command that start all kinds of processes; the first two start most of them."""


@pytest.fixture
def traps(tmp_path: Path) -> Traps:
    traps = Traps(tmp_path)
    jobs = traps.folder / "jobs"
    jobs.mkdir()
    (jobs / "mine.py").write_text(JOB)
    (jobs / "beside.py").write_text("def loss(y):\n    return y.sum()\n")
    (jobs / "helper.py").write_text("import beside\n")
    return traps


def test_every_command_is_started() -> None:
    assert list(STARTED) == list(COMMANDS)


def falls_into_none(words: str, traps: Traps) -> None:
    done = subprocess.run([*PLAIT, *words.split()], cwd=traps.folder, env=traps.environment, capture_output=True)
    assert traps.told == []
    assert done.returncode == (2 if words.endswith(" run") else 0), done.stdout + done.stderr
    assert b"Warning" not in done.stderr


@pytest.mark.parametrize("words", [words for several in STARTED.values() for words in several])
def test_no_command_imports_a_module_of_the_current_folder(words: str, traps: Traps) -> None:
    falls_into_none(words, traps)


@pytest.mark.timeout(600)
def test_the_processes_that_compile_import_none_either(traps: Traps) -> None:
    falls_into_none(f"train {MLP} --mesh shard=2 --compile --dropout 0", traps)


def test_the_module_imports_no_other_and_is_the_installed_command(tmp_path: Path) -> None:
    """``python -m plait`` itself takes plait where it finds it first."""
    traps = Traps(tmp_path, EVERY - {"plait"})
    start: Any = {"cwd": traps.folder, "env": traps.environment, "capture_output": True, "timeout": 100}
    words = ["train", "--batch", "1"]
    done, same = (subprocess.run([*program, *words], **start) for program in (MODULE, PLAIT))
    assert traps.told == [] and done.returncode == same.returncode == 2
    assert (done.stdout, done.stderr) == (same.stdout, same.stderr) and done.stderr.startswith(b"plait: error: ")


WITHOUT_TENSORS = ["--help", "--version", "brain", *STARTED["schedule"], "schedule --help", *STARTED["prove"]]
WITHOUT_TENSORS += STARTED["plan"]


@pytest.mark.parametrize("words", WITHOUT_TENSORS)
def test_a_command_without_tensors_imports_no_torch(words: str, tmp_path: Path) -> None:
    traps = Traps(tmp_path, ["torch", "numpy"])
    environment = {**traps.environment, "PYTHONPATH": str(traps.folder)}
    done = subprocess.run([*PLAIT, *words.split()], env=environment, capture_output=True, text=True, timeout=100)
    assert traps.told == []
    assert done.returncode == (2 if words == "brain" else 0), done.stderr


def test_plait_itself_imports_no_torch_and_has_all_its_names(tmp_path: Path) -> None:
    code = "import sys, plait\nassert 'torch' not in sys.modules\n"
    code += "assert {*plait.__all__} <= {*dir(plait)}\n"
    code += "from plait import *\nassert all(name in globals() for name in plait.__all__)\nplait.Enginee"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stderr.endswith("module 'plait' has no attribute 'Enginee'. Did you mean: 'Engine'?\n"), done.stderr


@pytest.mark.parametrize("program", [PLAIT, MODULE], ids=["installed", "module"])
def test_ctrl_c_while_torch_is_imported_is_one_line(program: list[str], tmp_path: Path, start: Any) -> None:
    traps = Traps(tmp_path, ["torch"], more="import time\ntime.sleep(100)")
    process = start(*program, "train", env={**traps.environment, "PYTHONPATH": str(traps.folder)})
    wait_for(lambda: traps.told, 60)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "plait: stopped by SIGINT\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_all_commands_says_what_each_of_them_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert COMMANDS[name] in " ".join(capsys.readouterr().out.split())
