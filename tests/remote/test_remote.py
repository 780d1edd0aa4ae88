"""Remote calls between real processes: scenes of ``remote_ranks.py``, most of them played by the same two."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
import plait.remote
from plait.remote import sendable

RANKS = Path(__file__).with_name("remote_ranks.py")


def play(start: Any, folder: Path, *words: str, ranks: int = 2) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each rank; a rank that is stopped is killed when rank 0 has ended."""
    env = os.environ | {"WORLD_SIZE": str(ranks), "PLAIT_STORE": str(folder / "store"), "OMP_NUM_THREADS": "1"}
    env |= {"TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", *words]
    started = [start(*command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    found = []
    for process in started:
        if words[-1] == "stopped" and found:
            process.send_signal(signal.SIGKILL)
        out, err = process.communicate(timeout=110)
        found.append((process.returncode, out, err))
    return found


def test_scenes_one_after_the_other(start: Any, tmp_path: Path) -> None:
    scenes = ("listens", "values", "errors", "devices", "counted")  # ports stay open, and the last one counts wrong
    for status, out, err in play(start, tmp_path, str(RANKS), *scenes):
        assert (status, out) == (0, "done\n" * len(scenes)), err


@pytest.mark.parametrize("scene", ["killed", "stopped"])
def test_a_callee_that_is_gone_is_one_error_within_its_deadline(scene: str, start: Any, tmp_path: Path) -> None:
    (status, out, err), (other, _, _) = play(start, tmp_path, str(RANKS), scene)
    assert (status, out, other) == (0, "done\n", -9), err


def test_threads_are_refused() -> None:
    def body(comm: plait.Comm) -> None:
        with pytest.raises(ValueError, match="remote calls go between processes"):
            plait.remote.connect(comm, {})

    plait.run_threads("shard=2", body)


def test_copies_are_sent_and_classes_refused() -> None:
    class Mine(torch.Tensor):
        pass

    sent = sendable(given := torch.ones(2), (), "argument 0")
    assert given.zero_() is not sent and sent.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"argument 0\[0\] has type .*Mine: remote calls carry tensors"):
        sendable([torch.ones(2).as_subclass(Mine)], (), "argument 0")


@pytest.mark.parametrize(("name", "ranks"), [("remote_pipeline", 3), ("parameter_server", 1)])
def test_an_example_on_other_ranks_is_one_line(name: str, ranks: int, start: Any, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / f"{name}.py"
    for status, out, err in play(start, tmp_path, str(script), ranks=ranks):
        assert (status, out) == (2, "") and "ranks" in err and err.count("\n") == 1, err


@pytest.mark.parametrize(("name", "ranks"), [("pipeline", 2), ("parameter_server", 3)])
def test_an_example_has_the_bits_of_what_it_rebuilds(name: str, ranks: int, start: Any, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("example_ranks.py"))
    for status, out, err in play(start, tmp_path, script, name, ranks=ranks):
        assert status == 0 and out.endswith("done\n"), err
