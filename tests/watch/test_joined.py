"""Under a user's torchrun: the ranks of a host tell what happened to one of them, and nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import alive, wait_for

SCRIPT = str(Path(__file__).with_name("joined_ranks.py"))
RANKS = 3

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")


class Torchrun:
    """A run of ``joined_ranks.py``, its words on stderr with the time at which they came."""

    def __init__(self, start: Callable[..., "subprocess.Popen[str]"], folder: Path, how: str, steps: int) -> None:
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir(parents=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        given = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
        environment = {**given, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        self.process = start(*torchrun, SCRIPT, how, str(folder), str(steps), env=environment)
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):  # the test is over, and has closed it
            for line in self.process.stderr:
                self.lines.append((time.monotonic(), line.rstrip("\n")))

    def pid(self, rank: int) -> int:
        return int((self.folder / f"rank{rank}.pid").read_text())

    def trains(self) -> None:
        wait_for((self.folder / "trains").exists)

    def told(self, text: str, after: float = 0.0) -> float:
        """When a line of plait's that holds ``text`` came."""
        wait_for(lambda: any(text in line and at >= after for at, line in self.lines), shown=lambda: self.shown)
        return next(at for at, line in self.lines if text in line and at >= after)

    def ends(self) -> int:
        code = self.process.wait(120)
        self._reader.join(120)
        return code

    @property
    def shown(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def headlines(self) -> list[str]:
        return [line for _, line in self.lines if line.startswith("plait: ")]

    @property
    def litter(self) -> list[str]:
        return [path.name for path in self.temporary.glob("plait*")]


@pytest.fixture
def torchrun(start: Any, tmp_path: Path) -> Callable[..., Torchrun]:
    return lambda how, steps=10_000, name="run": Torchrun(start, tmp_path / name, how, steps)


@pytest.mark.parametrize("how", ["well", "careless"])
def test_a_run_that_ends_well_says_nothing_and_leaves_nothing(torchrun: Callable[..., Torchrun], how: str) -> None:
    run = torchrun(how, 8)
    assert run.ends() == 0, run.shown
    assert run.headlines == []
    assert run.litter == []


def test_a_killed_rank_is_named_before_the_agent_ends_the_others(torchrun: Callable[..., Torchrun]) -> None:
    run = torchrun("wait")
    run.trains()
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.ends() != 0
    assert run.headlines == ["plait: rank 1 was killed by SIGKILL"], run.shown
    assert "rank 0: waits for rank" in run.shown
    assert run.litter == []


def test_a_rank_that_leaves_early_is_named_though_others_fail(torchrun: Callable[..., Torchrun]) -> None:
    run = torchrun("leave")
    assert run.ends() != 0
    assert run.headlines == ["plait: rank 1 left before the others, with exit code 0"], run.shown
    assert run.litter == []


def test_an_exception_is_told_with_its_words_escaped(torchrun: Callable[..., Torchrun]) -> None:
    run = torchrun("raise")
    assert run.ends() != 0
    assert run.headlines == ["plait: rank 1 failed: RuntimeError: the matter is here\\x1b[2J"], run.shown


def test_a_rank_that_stands_still_shows_its_stack_and_a_stopped_one_is_called_so(
    torchrun: Callable[..., Torchrun],
) -> None:
    run = torchrun("still")
    run.trains()
    run.told("plait: rank 1 has stood still for")
    run.told("joined_ranks.py")
    os.kill(run.pid(0), signal.SIGSTOP)
    run.told("plait: rank 0 is stopped")
    os.kill(run.pid(0), signal.SIGCONT)


def test_a_slow_rank_is_told_once_and_goes_on(torchrun: Callable[..., Torchrun]) -> None:
    run = torchrun("slow", 80)
    assert run.ends() == 0, run.shown
    assert len(run.headlines) == 1
    assert run.headlines[0].startswith("plait: rank 1 computes ")
    assert run.litter == []


def test_a_signal_to_one_rank_stops_all_behind_one_step(torchrun: Callable[..., Torchrun]) -> None:
    run = torchrun("wait")
    run.trains()
    os.kill(run.pid(2), signal.SIGUSR1)
    assert run.ends() == 0, run.shown
    assert run.process.stdout is not None
    said = sorted(run.process.stdout.read().splitlines())
    steps = {line.partition("behind ")[2] for line in said}
    assert len(said) == RANKS
    assert len(steps) == 1
    assert steps.pop().endswith(f"(2, {int(signal.SIGUSR1)})")


def test_a_program_that_does_not_look_ends_as_it_always_did(torchrun: Callable[..., Torchrun]) -> None:
    run = torchrun("deaf")
    run.trains()
    os.kill(run.pid(2), signal.SIGTERM)
    assert run.ends() != 0
    assert f"exitcode  : {-signal.SIGTERM}" in run.shown


def test_nobody_outlives_the_agent_a_stopped_rank_neither(torchrun: Callable[..., Torchrun]) -> None:
    run = torchrun("wait")
    run.trains()
    pids = [run.pid(rank) for rank in range(RANKS)]
    os.kill(pids[1], signal.SIGSTOP)
    run.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert run.litter == []
