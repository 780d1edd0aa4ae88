"""The campaign: it sees real faults, counts goals correctly, and a short one passes with real runs."""

import sys
from pathlib import Path

import campaign
import pytest
from campaign import ROWS, CampaignRow, RowResult, main, run_campaign
from ground import Ground
from observed import Observed
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


ALONE = {"signal": 4, **dict.fromkeys(["kill", "launcher", "stop", "disk"], 1)}
"""Times that each is tried.  A cheaper test holds each claim by day; the fourth signal goes to one rank."""


@LINUX
@pytest.mark.parametrize("name", ["hosts", "link", "stranger"])
def test_a_short_campaign(name: str, tmp_path: Path) -> None:
    tried(name, tmp_path, 1 if name == "stranger" else 2)


@LINUX
@pytest.mark.parametrize("name", ALONE)
def test_a_campaign_of_one_host(name: str, tmp_path: Path) -> None:
    tried(name, tmp_path, ALONE[name])


def tried(name: str, folder: Path, times: int) -> None:
    """Right, however slow: a loaded machine cannot tell."""
    (found,) = (row for row in ROWS if row.name == name)
    if why := found.needs():
        pytest.skip(why)
    *_, last = run_campaign([found], folder, times=times, seed=7)
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
