"""Under a user's torchrun the ranks of a host report the fault of one of them, and nothing is left."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from observed import Observed
from waiting import wait_for

SCRIPT = str(Path(__file__).with_name("joined_ranks.py"))
RANKS = 3
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), SCRIPT)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
Started = Callable[..., Observed]


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Started]:
    """Starts ``joined_ranks.py``; when it trains, the run is given to the test."""
    runs: list[Observed] = []

    def start(how: str, steps: int = 10_000, *, trains: bool = True) -> Observed:
        (tmp_path / "tmp").mkdir()
        environment = {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
        runs.append(Observed([how, str(tmp_path), str(steps)], environment, program=TORCHRUN))
        if trains:
            wait_for((tmp_path / "trains").exists, shown=runs[-1].text)
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def send(folder: Path, rank: int, number: signal.Signals) -> None:
    os.kill(int((folder / f"rank{rank}.pid").read_text()), number)


def headlines(run: Observed) -> list[str]:
    return [line.text for line in run.lines if line.text.startswith("plait: ")]


def litter(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").glob("plait*")]


@pytest.mark.parametrize("how", ["well", "careless"])
def test_a_run_that_ends_well_says_nothing_and_leaves_nothing(torchrun: Started, how: str, tmp_path: Path) -> None:
    run = torchrun(how, 8, trains=False)
    assert run.finish(120) == 0, run.text()
    assert headlines(run) == litter(tmp_path) == []


def test_a_killed_rank_is_named_before_the_agent_ends_the_others(torchrun: Started, tmp_path: Path) -> None:
    run = torchrun("wait")
    send(tmp_path, 1, signal.SIGKILL)
    assert run.finish(120)
    what = {"was killed by SIGKILL", "is gone without a word: killed, or ended by os._exit"}  # if the agent asked first
    assert headlines(run)[0].removeprefix("plait: rank 1 ") in what and not headlines(run)[1:], run.text()
    assert "rank 0: waits for rank" in run.text() and litter(tmp_path) == []


def test_a_rank_that_leaves_early_is_named_though_others_fail(torchrun: Started, tmp_path: Path) -> None:
    run = torchrun("leave")
    assert run.finish(120)
    assert headlines(run) == ["plait: rank 1 left before the others, with exit code 0"], run.text()
    assert litter(tmp_path) == []


def test_a_rank_that_stands_still_shows_its_stack_and_a_stopped_one_is_called_so(
    torchrun: Started, tmp_path: Path
) -> None:
    run = torchrun("still")
    assert run.wait_for("plait: rank 1 has stood still for", 120), run.text()
    assert run.wait_for("joined_ranks.py", 120), run.text()
    send(tmp_path, 0, signal.SIGSTOP)
    assert run.wait_for("plait: rank 0 is stopped", 120), run.text()
    send(tmp_path, 0, signal.SIGCONT)


def test_a_signal_to_one_rank_stops_all_behind_one_step(torchrun: Started, tmp_path: Path) -> None:
    run = torchrun("wait")
    send(tmp_path, 2, signal.SIGUSR1)
    assert run.finish(120) == 0, run.text()
    said = run.text("out").splitlines()
    (stop,) = {line.partition("behind ")[2] for line in said}
    assert len(said) == RANKS and stop.endswith(f"(2, {int(signal.SIGUSR1)})")
