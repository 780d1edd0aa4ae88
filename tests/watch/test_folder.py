"""The private folder of a host's ranks, and its required owner."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from plait.comm import ThreadWorld
from plait.run.watch.joined import shared_folder, watch_joined
from plait.run.watch.page import WATCH, Page
from plait.table.mesh import Mesh


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def place_of(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"plait-ranks-{os.getuid()}-{name}"


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_what_may_be_another_ones_is_refused(what: str, tmp_path: Path) -> None:
    folder = place_of("x")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if what == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    elif what == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.write_text("")
    with pytest.raises(ValueError, match=r"is not a folder of user \d+ with mode 700: .* set TMPDIR"):
        shared_folder("x")


def test_one_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: user)
    with pytest.raises(ValueError, match=rf"is not a folder of user {user} with mode 700"):
        shared_folder("x")


def test_a_page_that_cannot_be_used_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comm = ThreadWorld(Mesh(shard=2)).comm(1)
    monkeypatch.setenv(WATCH, str(tmp_path / "nowhere\x1b[2J"))
    watch_joined(comm)
    shown = capsys.readouterr().err
    assert shown.startswith("plait: rank 1 runs without a status page: ")
    assert "\x1b" not in shown
    assert comm.observers == ()


def test_a_launchers_page_is_used_and_left_to_it(tmp_path: Path, monkeypatch: Any) -> None:
    comm = ThreadWorld(Mesh(shard=2)).comm(1)
    page = Page(tmp_path, 2)
    monkeypatch.setenv(WATCH, str(tmp_path))
    watch_joined(comm)
    assert (page.read(1).pid, page.read(1).state) == (os.getpid(), "starting")
    comm.close()
    assert page.read(1).state == "done"
    assert tmp_path.exists()
