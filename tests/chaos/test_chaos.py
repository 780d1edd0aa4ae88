"""The campaign: real faults in real runs, a few of each."""

import sys
from pathlib import Path

import pytest
from campaign import ROWS, RowResult, run_campaign

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

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
