"""Own processes, threads and torchrun: which rank prints, a failure's report, and nothing left behind."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from observed import listening
from ports import free_port
from waiting import alive, children, wait_for

import plait
from plait.comm.base import Comm
from plait.run.commands.main import main
from plait.run.launch.local import launch, rank_environment
from plait.run.measure.comm import BenchConfig

SCRIPT = str(Path(__file__).with_name("ranks.py"))
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def ranks(start: Any) -> Any:
    """Starts ``ranks.py`` with these words."""

    def run(*words: str) -> Any:
        left_out = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
        return start(sys.executable, SCRIPT, *words, env={k: v for k, v in os.environ.items() if k not in left_out})

    return run


@pytest.fixture
def finish(ranks: Any) -> Any:
    """Exit code, output and errors of ``ranks.py``."""

    def finish(*words: str) -> tuple[int, str, str]:
        process = ranks(*words)
        out, err = process.communicate(timeout=110)
        return process.returncode, out, err

    return finish


def test_rank_0_speaks_and_every_argument_arrives_as_it_was(finish: Any) -> None:
    code, out, err = finish("speak", "a b", "${local_rank}", "$$")
    assert (code, err) == (0, "")
    heard, environment = out.splitlines()
    assert heard == "rank 0 of 2 heard ['a b', '${local_rank}', '$$']"
    assert environment.startswith("OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo")


def test_the_original_traceback_comes_first_and_once(finish: Any) -> None:
    code, out, err = finish("raise")
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.count("Traceback") == 1
    assert err.count("\nRuntimeError: the matter is here") == 1
    assert "\nplait: rank 1 failed: RuntimeError: the matter is here\n  on host " in err


def test_the_ranks_own_exit_code_is_passed_on_after_rank_0_has_spoken(finish: Any) -> None:
    assert finish("code") == (7, "rank 0 had to the end\n", "")


def test_a_stopped_rank_is_named_and_ended_at_the_deadline(finish: Any) -> None:
    code, out, err = finish("stop")
    assert (code, out) == (1, "")
    assert "plait: rank 1 is stopped (SIGSTOP)" in err
    assert "rank 0: waits for rank 1 before its first step, in barrier over " in err
    assert err.endswith("plait: rank 1 held up the others for 5 s: all are ended\n")
    assert "SIGKILL" not in err


@LINUX
def test_a_stop_of_the_whole_group_for_longer_than_the_deadline_is_no_fault(ranks: Any, tmp_path: Path) -> None:
    process = ranks("pause", str(tmp_path / "waits"))
    wait_for((tmp_path / "waits").exists, 100)
    time.sleep(0.3)  # rank 0 comes to its barrier
    (server,) = children(process.pid)
    group = [process.pid, server, *children(server)]
    for number, seconds in ((signal.SIGSTOP, 12), (signal.SIGCONT, 0)):
        for one in group:  # the launcher may look before the others go on
            os.kill(one, number)
            time.sleep(0.2 if number == signal.SIGCONT else 0)
        time.sleep(seconds)
    out, err = process.communicate(timeout=110)
    assert (process.returncode, out, err) == (0, "", "")


@LINUX
@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, ("over gloo",)), (signal.SIGKILL, ())])
def test_nothing_listens_and_no_rank_outlives_the_launcher(
    number: signal.Signals, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Any
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    process = ranks("sleep", str(tmp_path), *words)
    files = [tmp_path / f"rank{rank}.pid" for rank in (0, 1)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), 100)
    ids = [int(file.read_text()) for file in files]
    (server,) = children(process.pid)
    assert sorted(children(server)) == sorted(ids)
    assert not listening([process.pid, server])
    open_at = {port.address for port in listening(ids)}
    assert open_at == ({"0100007F"} if words else set()), "gloo connects on 127.0.0.1, shared memory not at all"
    (folder,) = Path(tmp_path / "tmp").glob("plait-*")  # torch leaves one of its compiler
    assert folder.stat().st_mode & 0o777 == 0o700
    if number == signal.SIGKILL:
        os.kill(ids[1], signal.SIGSTOP)
    process.send_signal(number)
    _, err = process.communicate(timeout=110)
    wait_for(lambda: not any(alive(process_id) for process_id in (server, *ids)), 10)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert err == "plait: stopped by SIGINT, with all ranks\n"
        assert not folder.exists()


def test_another_number_of_processes_than_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert main(["bench", "comm", "--mesh", "replica=2 shard=2"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "has 4 ranks, but 3 processes were started" in shown
    assert "shard=3" in shown


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT not set: start this program with torchrun"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID is 1, and SLURM_STEP_NUM_TASKS, SLURM_GTIDS"),
        ({"WORLD_SIZE": "2", "SLURM_PROCID": "1"}, "RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"RANK": "", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1"}, ""),
    ],
)
def test_half_a_launcher_is_refused(
    given: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    words = ["--world", "thread", "--mesh", "shard=2", "--model", "mlp", "--steps", "1"]
    for command in ("train", "verify"):
        assert main([command, *words]) == (2 if says else 0)
        shown = capsys.readouterr().err
        assert says in shown and shown.count("\n") == bool(says)
    if says:
        with pytest.raises(ValueError, match=re.escape(says)):
            plait.join()
    else:
        assert plait.join().world_size == 1


def test_ranks_that_never_come_are_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(free_port())
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    assert main(["bench", "comm", "--deadline", "1"]) == 2
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("plait")]
    assert len(shown) == 1
    assert f"127.0.0.1:{port}" in shown[0]


def test_threads_return_the_worst_code_and_raise_the_first_error() -> None:
    config = BenchConfig(world="thread", mesh="shard=3")
    assert launch(config, lambda comm: comm.rank, []) == 2

    def body(comm: Comm) -> int:
        if comm.rank == 1:
            raise RuntimeError("the matter is here")
        comm.barrier(("shard",))
        return 0

    with pytest.raises(RuntimeError, match="the matter is here"):
        launch(config, body, [])


def test_what_the_user_has_set_is_left_alone() -> None:
    config = BenchConfig(threads=3)
    ours = rank_environment(config, {})
    assert ours["OMP_NUM_THREADS"] == "3"
    assert set(ours) - set(rank_environment(config, ours)) == set(ours) - {"PLAIT_LAUNCHER"}
