"""The agent over ranks that are small processes: signals, restarts, refusals, exit codes."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from disks import small_disk

from plait.run.launch.agent import Limits, RankAgent
from plait.run.launch.signals import ASKING, Asked, heard
from plait.run.watch.page import WATCH, Page, Status
from plait.table.mesh import Mesh


def test_every_signal_asks_once_and_a_second_sigint_ends_at_once() -> None:
    told: list[int] = []
    asked = Asked(told.append, grace=100)
    with heard(asked):
        for number in ASKING:
            if number != signal.SIGINT:
                os.kill(os.getpid(), number)
        assert told == [asked.number] and asked.number in ASKING
        with pytest.raises(SystemExit) as left:
            os.kill(os.getpid(), signal.SIGINT)
    assert left.value.code == 128 + signal.SIGINT


def test_without_grace_the_first_one_ends_at_once() -> None:
    with heard(Asked(lambda _: None, grace=0)), pytest.raises(SystemExit) as left:
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM


def test_the_handlers_of_before_come_back_and_what_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        told: list[int] = []
        asked = Asked(told.append, grace=100)
        others = {number: signal.getsignal(number) for number in ASKING}
        with heard(asked):
            os.kill(os.getpid(), signal.SIGHUP)  # nohup
            os.kill(os.getpid(), signal.SIGUSR1)
        assert told == [signal.SIGUSR1]
        assert {number: signal.getsignal(number) for number in ASKING} == others
    finally:
        signal.signal(signal.SIGHUP, before)


def test_when_the_time_is_over_it_ends_at_once() -> None:
    asked = Asked(lambda _: None, grace=0.1)
    with pytest.raises(SystemExit) as left, heard(asked):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert left.value.code == 128 + signal.SIGTERM and asked.late


def test_who_has_ended_in_time_is_left_alone() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        with heard(Asked(lambda _: None, grace=0.1)):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        assert told == []
    finally:
        signal.signal(signal.SIGTERM, before)


DONE = ": done; "


class Shells:
    """In place of the fork server: a rank is a line of shell; one that begins with DONE has told so on the page."""

    def __init__(self, *attempts: str) -> None:
        self.attempts = list(attempts)
        self.started: list[subprocess.Popen[bytes]] = []
        self.variables: list[Mapping[str, str]] = []

    def fork(self, variables: Mapping[str, str]) -> int:
        line = self.attempts[int(variables["TORCHELASTIC_RESTART_COUNT"])]
        if line.startswith(DONE):
            Page(Path(variables[WATCH]), 2).write(Status(int(variables["RANK"]), "host", os.getpid(), "done"))
        self.started.append(subprocess.Popen(["sh", "-c", line], env={"PATH": "/usr/bin:/bin", **variables}))
        self.variables.append(variables)
        return self.started[-1].pid

    def ended(self) -> Mapping[int, int]:
        return {p.pid: p.returncode for p in self.started if p.poll() is not None}


def agent_of(folder: Path, shells: Any, limits: Limits) -> RankAgent:
    return RankAgent(Mesh(shard=2), folder, shells, limits, deadline=60)


def run(folder: Path, shells: Any, limits: Limits) -> RankAgent:
    agent = agent_of(folder, shells, limits)
    agent.run()
    assert all(p.poll() is not None for p in shells.started)
    return agent


KILLED = "[ $RANK = 1 ] && kill -9 $$; exec sleep 100"


def test_ranks_that_end_well_are_not_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shells = Shells(f"{DONE}exit 0")
    assert run(tmp_path, shells, Limits(restarts=3)).code == 0
    assert [v["RANK"] for v in shells.variables] == ["0", "1"]
    assert "MASTER_ADDR" not in shells.variables[0]
    assert capsys.readouterr().err == ""


def test_a_killed_rank_ends_all_and_they_are_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shells = Shells(KILLED, f"{DONE}exit 0")
    agent = run(tmp_path, shells, Limits(restarts=1, kept=lambda: "step-5"))
    assert agent.code == 0
    shown = capsys.readouterr().err
    assert "rank 1 of mesh shard=2 was killed by SIGKILL" in shown
    assert "plait: restart 1 of 1, from step-5\n" in shown
    stores = [v["PLAIT_STORE"] for v in shells.variables]
    assert len(set(stores)) == 2, "each attempt meets in a place of its own"


HARM = {
    "removed": 'rm -r "${PLAIT_WATCH%/*}"',
    "full": 'cat /dev/zero > "$PLAIT_WATCH/../../more"',
    "without inodes": 'cd "$PLAIT_WATCH/../.."; for i in $(seq 30); do : > $i; done',
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_temporary_folder_that_takes_no_more_is_no_reason_to_stay_down(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", "128k,nr_inodes=20") as place:
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            meets = f': > "$PLAIT_STORE"; [ $RANK = 1 ] || exec sleep 100; ({harm}) 2> /dev/null; {KILLED}'
            shells = Shells(meets, f'{DONE}: > "$PLAIT_STORE" || exit 4; exit 0')
            assert run(Path(folder), shells, Limits(restarts=1)).code == 0


def test_a_lost_server_ends_the_run(tmp_path: Path) -> None:
    def lost() -> Mapping[int, int]:
        for process in shells.started:
            process.kill()
        raise ConnectionError("the server was killed by SIGKILL")

    shells = Shells("exec sleep 100")
    shells.ended = lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the server was killed by SIGKILL"):
        run(tmp_path, shells, Limits(restarts=1))
    assert len(shells.started) == 2
    for process in shells.started:
        process.wait()


@pytest.mark.parametrize("who", ["0 1", "1"])
def test_ranks_that_end_before_they_are_done_have_failed(
    who: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shells = Shells(f"case '{who}' in *$RANK*) exit 0;; esac; exec sleep 100", f"{DONE}exit 0")
    assert run(tmp_path, shells, Limits(restarts=1)).code == 0
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.endswith("ended with exit code 0 before it was done; the others were stopped")
    assert last == "plait: restart 1 of 1, from the beginning"


def test_a_fault_without_a_restart_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, Shells(KILLED), Limits(hint=lambda: "go on")).code == 137
    assert capsys.readouterr().err.endswith("\nplait: go on\n")


def test_the_last_attempt_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = run(tmp_path, Shells(KILLED, "exit 3"), Limits(restarts=1))
    assert agent.code == 3
    assert "not started again: 1 restarts were allowed, and made" in capsys.readouterr().err


def test_a_fault_behind_the_last_step_is_no_reason_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def kept() -> str:
        raise ValueError("all steps are made, and nothing else")

    shells = Shells(KILLED)
    assert run(tmp_path, shells, Limits(restarts=3, kept=kept)).code == 128 + signal.SIGKILL
    assert len(shells.started) == 2
    assert capsys.readouterr().err.endswith("plait: not started again: all steps are made, and nothing else\n")


def test_what_is_refused_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"nanoseconds": 1, "final": True}
    note = json.dumps({"message": {"message": "plait: error: no\n", "extraInfo": extra}}).replace("\\n", "\\\\n")
    agent = run(tmp_path, Shells(f"printf '{note}' > $TORCHELASTIC_ERROR_FILE; exit 2"), Limits(restarts=3))
    assert agent.code == 2
    assert capsys.readouterr().err == "plait: error: no\n"


def test_a_signal_in_between_starts_nothing_more(tmp_path: Path) -> None:
    shells = Shells(KILLED, KILLED)

    def kept() -> str:
        if len(shells.started) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return ""

    agent = agent_of(tmp_path, shells, Limits(restarts=3, grace=100, kept=kept))
    with pytest.raises(SystemExit) as left, heard(agent.asked):  # which also ends the count of its time
        agent.run()
    assert (left.value.code, len(shells.started)) == (143, 4)


def test_ranks_that_do_not_end_in_time_are_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shells = Shells("exec sleep 100")
    agent = agent_of(tmp_path, shells, Limits(grace=0.3))
    with pytest.raises(SystemExit) as left, heard(agent.asked):
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
        agent.run()
    assert left.value.code == 143
    assert all(p.poll() is not None for p in shells.started)
    assert "rank 0, 1 did not end within 0.3 s (--grace)" in capsys.readouterr().err


def test_ranks_whose_end_nobody_tells_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.run.launch.agent.BURY_SECONDS", 0.2)
    shells = Shells(KILLED)
    said: dict[int, int] = {}
    monkeypatch.setattr(shells, "ended", lambda: said or said.update(Shells.ended(shells)) or said)
    agent = agent_of(tmp_path, shells, Limits())
    with pytest.raises(ConnectionError, match=r"rank 0 was killed, and 0\.2 s later it is not known to have ended"):
        agent.run()
    assert agent.code == 137
    for process in shells.started:
        process.wait()
