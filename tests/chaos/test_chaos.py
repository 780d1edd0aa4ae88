"""The campaign: what it watches is what happens, what it calls met is met, and a short one with real runs."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

import campaign
import pytest
from campaign import ROWS, CampaignRow, RowResult, main, run_campaign
from ground import Ground
from observed import LOOPBACK, Observed, ProcessId, alive, listening
from trials import Result

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
PYTHON = (sys.executable, "-c")


def test_lines_come_with_their_moment_and_stream() -> None:
    child = Observed([], program=(*PYTHON, "import sys, time; print('one'); time.sleep(0.3); sys.exit('two')"))
    first, second = child.wait_for("^one$", 30), child.wait_for("tw.", 30)
    assert first and second and (first.stream, second.stream) == ("out", "err")
    assert second.at - first.at > 0.2
    assert child.wait_for("three", 30) is None, "it does not wait for what cannot come any more"
    assert child.wait_for("two", 1, after=second.at) is None
    assert (child.finish(30), child.text("out"), child.text()) == (1, "one", "two")


@LINUX
def test_what_does_not_end_is_ended_with_all_its_processes() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(1); time.sleep(300)'])"
    child = Observed([], program=(*PYTHON, program))
    assert child.wait_for("1", 60)
    (below,) = child.below()
    assert alive(below) and not alive(ProcessId(below.pid, below.start + 1)), "another process of the same number"
    assert child.finish(0.1) is None
    end = time.monotonic() + 30
    while alive(below):
        assert time.monotonic() < end
        time.sleep(0.02)


@LINUX
def test_what_outlives_a_command_is_seen_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observed.GONE_SECONDS", 0.1)
    program = "import subprocess; subprocess.Popen(['sleep', '300'], stdout=-3, stderr=-3); print('left')"
    child = Observed([], program=(*PYTHON, program))
    assert child.finish(60) == 0 and child.orphans == 1
    end = time.monotonic() + 30
    while child.below():
        assert time.monotonic() < end
        time.sleep(0.02)


@LINUX
def test_who_listens_is_found_and_from_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as inside, socket.create_server(("0.0.0.0", 0)) as outside:
        found = {port.number: port.address for port in listening([os.getpid()])}
        assert found[inside.getsockname()[1]] in LOOPBACK
        assert found[outside.getsockname()[1]] not in LOOPBACK


def row(*results: Result, **limits: float) -> RowResult:
    return RowResult(CampaignRow("a", "b", "c", lambda ground, number: results[number], limits), list(results))


def test_a_goal_is_met_by_the_worst_trial_and_by_all() -> None:
    assert row(Result(), Result("", {"told": 0.9})).met
    assert row(Result("", {"told": 0.2}), Result("", {"told": 0.9}), told=1.0).met
    late = row(Result("", {"told": 0.1}), Result("", {"told": 1.1}), told=1.0)
    assert (late.late(), late.met, late.measured()) == (["told"], False, {"told": (0.6000000000000001, 1.1)})
    assert not row(Result("another rank was named", {"told": 0.1}), told=1.0).met
    assert row(Result(), Result("", {"told": 0.9}), told=1.0).late() == ["told"], "it was not measured in one of them"


def test_a_trial_that_breaks_is_wrong_and_the_campaign_goes_on(tmp_path: Path) -> None:
    def trial(ground: Ground, number: int) -> Result:
        if not number:
            raise OSError("no such process")
        return Result("", {"seconds": 1.0})

    *trials, last = run_campaign([CampaignRow("a", "b", "c", trial, {"seconds": 2})], tmp_path / "new", times=3)
    assert not list((tmp_path / "new").iterdir())
    assert len(trials) == 3 and isinstance(last, RowResult)
    assert last.wrong == ["OSError: no such process"] and not last.late() and not last.met


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rows", "fire"], "no row 'fire': there are kill"),
        (["--times", "0"], "times is 0: give a whole number from 1"),
        (["--folder", "/proc/self"], "nothing can be written|folder '/proc/self'"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert re.search(says, error) and error.count("\n") == 1


ONCE = dict.fromkeys(["kill", "launcher", "stop", "disk", "exception", "stranger"], 1)
SHORT = {**ONCE, "signal": 4, "hosts": 2, "link": 2}
"""How often: the fourth signal is one to a rank."""


@pytest.mark.parametrize("name", SHORT)
def test_a_short_campaign(name: str, tmp_path: Path) -> None:
    """Whether it is right; how fast, a loaded machine cannot tell."""
    (found,) = (row for row in ROWS if row.name == name)
    if why := found.needs():
        pytest.skip(why)
    *_, last = run_campaign([found], tmp_path, times=SHORT[name], seed=7)
    assert isinstance(last, RowResult) and not last.wrong, last.wrong


def test_a_row_that_cannot_be_tried_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        CampaignRow("a", "b", "c", lambda ground, number: Result(), needs=lambda: "no root"),
        CampaignRow("d", "e", "f", lambda ground, number: Result()),
    )
    monkeypatch.setattr(campaign, "ROWS", rows)
    assert main(["--times", "1"]) == 0
    shown = capsys.readouterr()
    assert "a: not tried: no root" in shown.out and "d 0: right" in shown.out, shown
    assert main(["--rows", "a"]) == 2
    assert "row 'a' can't be tried here: no root" in capsys.readouterr().err
