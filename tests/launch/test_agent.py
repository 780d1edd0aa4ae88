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


@pytest.mark.parametrize("grace", [0, 0.1])
def test_when_the_time_is_over_it_ends_at_once(grace: float) -> None:
    asked = Asked(lambda _: None, grace=grace)
    with pytest.raises(SystemExit) as left, heard(asked):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert left.value.code == 128 + signal.SIGTERM and asked.late == bool(grace)


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


DONE, KILLED = ": done; ", "[ $RANK = 1 ] && kill -9 $$; exec sleep 100"
LOST = (": failed; exit 1", ": waiting; sleep 1; kill -9 $$")
"""Rank 0 loses its connection to rank 1, whose end is known a second later."""


class Shells:
    """In place of the fork server: a rank is a line of shell (or one each); ``: WORD; `` is written on the page."""

    def __init__(self, *attempts: str | tuple[str, ...]) -> None:
        self.attempts = list(attempts)
        self.started: list[subprocess.Popen[bytes]] = []
        self.variables: list[Mapping[str, str]] = []

    def fork(self, variables: Mapping[str, str]) -> int:
        given, rank = self.attempts[int(variables["TORCHELASTIC_RESTART_COUNT"])], int(variables["RANK"])
        line = given if isinstance(given, str) else given[rank]
        if line.startswith(": "):
            said: Any = {"state": line[2:].partition(";")[0], "error": "ConnectionError: gone" * (rank == 0)}
            Page(Path(variables[WATCH]), 2).write(Status(rank, "host", os.getpid(), **said))
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


def over() -> str:
    raise ValueError("all steps are made, and nothing else")


GOOD, EARLY, ENDED = f"{DONE}exit 0", "[ $RANK = 1 ] && exit 0; exec sleep 100", "plait: rank 1 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("attempts", "limits", "code", "first", "last"),
    [
        ((GOOD,), Limits(3), 0, "", ""),
        ((KILLED, GOOD), Limits(1, kept=lambda: "step-5"), 0, ENDED, "plait: restart 1 of 1, from step-5"),
        ((KILLED, "exit 3"), Limits(1), 3, ENDED, "plait: not started again: 1 restarts were allowed, and made"),
        ((KILLED,), Limits(hint=lambda: "go on"), 137, ENDED, "plait: go on"),
        ((LOST,), Limits(hint=lambda: "go on"), 137, ENDED, "plait: go on"),
        ((KILLED,), Limits(3, kept=over), 137, ENDED, "plait: not started again: all steps are made, and nothing else"),
        (("exit 0", GOOD), Limits(1), 0, "exit code 0 before it was done", "plait: restart 1 of 1, from the beginning"),
        ((EARLY, GOOD), Limits(1), 0, "exit code 0 before it was done", "plait: restart 1 of 1, from the beginning"),
    ],
)
def test_a_fault_is_named_ends_all_and_is_followed_by_another_attempt_within_the_limits(
    attempts: Any, limits: Limits, code: int, first: str, last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shells = Shells(*attempts)
    assert run(tmp_path, shells, limits).code == code
    shown = capsys.readouterr().err.replace(" of mesh shard=2", "").splitlines() or [""]
    assert first in shown[0] and shown[-1] == last
    assert [v["RANK"] for v in shells.variables] == ["0", "1"] * len(attempts)
    assert len({v["PLAIT_STORE"] for v in shells.variables}) == len(attempts), "each attempt has another meeting place"
    assert "MASTER_ADDR" not in shells.variables[0]


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
    assert "ranks 0, 1 did not end within 0.3 s (--grace)" in capsys.readouterr().err


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
