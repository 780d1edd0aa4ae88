"""Every lesson runs on other numbers of ranks and on processes, or says in one line why not."""

import os
import subprocess
import sys
from inspect import signature
from types import SimpleNamespace

import pytest
import torch

import plait
from plait.run.commands.lesson import _compare, mesh_of, same
from plait.run.commands.main import main
from plait.run.course.lessons import find, numbered
from plait.run.job.user_code import load_file

NUMBERS = [lesson.number for lesson in numbered()]
WITH_RANKS = [number for number in NUMBERS if number not in (1, 2, 8, 18, 21)]
SLOW = (4, 18, 21)
"""Two start processes, and one trains a real model."""


def module(number: int):
    return load_file(str(find(number).path), "lesson")


@pytest.mark.parametrize("number", NUMBERS)
def test_the_fewest_and_the_most_ranks(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    allowed = [n for n in module(number).RANKS if n <= 8]
    usual = signature(module(number).main).parameters["ranks"].default  # which test_course.py runs
    for ranks in {allowed[0], allowed[-1]} - {usual} if number not in SLOW else ():
        assert main(["lesson", "run", str(number), "--ranks", str(ranks)]) == 0
    capfd.readouterr()
    refused = next(n for n in range(1, 100) if n not in module(number).RANKS)
    for world in ("thread", "process"):
        assert main(["lesson", "run", str(number), "--ranks", str(refused), "--world", world]) == 2
        shown = capfd.readouterr().err
        assert shown.startswith(f"plait: error: lesson {number} runs on ") and f", not {refused}: " in shown
        assert shown.count("\n") == 1


@pytest.mark.parametrize("number", NUMBERS)
def test_a_body_gives_the_same_twice_so_that_worlds_can_be_compared(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    if number in WITH_RANKS:
        lesson = module(number)
        assert not any(plait.run_threads(lesson.MESH, lambda comm: _compare(number, lesson, comm)))
        assert f"lesson {number} on " in capfd.readouterr().out
    else:
        assert main(["lesson", "run", str(number), "--world", "process"]) == 2
        assert capfd.readouterr().err.endswith(
            f"lesson {number} has no ranks, or starts them itself: plait lesson run {number}\n"
        )


@pytest.mark.parametrize("number", WITH_RANKS)
def test_processes_have_the_bits_of_threads(number: int) -> None:
    command = [sys.executable, "-m", "plait", "lesson", "run", str(number), "--world", "process"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "each rank has its thread's values, to the bit" in done.stdout and done.stdout.count("\n") == 1


def test_torchrun_says_how_many_ranks_there_are() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "-m", "plait", "lesson", "run", "9"], env=environment, capture_output=True, text=True
    )
    assert "lesson 9 on 2 processes, shard=2: each rank has its thread's values" in done.stdout, done.stderr


def test_a_body_that_differs_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    calls = iter(range(100))
    lesson = SimpleNamespace(body=lambda comm: next(calls))
    assert plait.run_threads("shard=2", lambda comm: _compare(9, lesson, comm)) == [1, 1]
    assert "ranks [0, 1] differ from the same ranks as threads" in capfd.readouterr().out


def test_results_are_compared_whole() -> None:
    ours = {"a": [torch.ones(2), (1, "x")], 3: None}
    assert same(ours, {"a": [torch.ones(2), (1, "x")], 3: None})
    for other in ({"a": [torch.ones(2), (2, "x")], 3: None}, {"a": [torch.ones(3), (1, "x")], 3: None}, {"a": []}):
        assert not same(ours, other)


def test_another_number_of_ranks_changes_one_axis() -> None:
    assert str(mesh_of(9, "shard=4", 2)) == "shard=2" and str(mesh_of(3, "pipe=2", 5)) == "pipe=5"
    assert str(mesh_of(14, "replica=2 shard=2 tensor=2", 4)) == "replica=2 tensor=2"
    with pytest.raises(ValueError, match="lesson 13: 3 ranks do not make its mesh"):
        mesh_of(13, "replica=2 shard=2", 3)
