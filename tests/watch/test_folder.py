"""The private folder of ranks that nobody supervises: whose it must be, and what is swept."""

import os
from pathlib import Path
from typing import Any

import pytest

from plait.comm import ThreadWorld
from plait.core.mesh import Mesh
from plait.watch.joined import PREFIX, WATCH, private_folder, sweep, watch_joined
from plait.watch.page import Page, StatusRecord
from plait.watch.processes import born


def test_it_is_this_users_alone(tmp_path: Path) -> None:
    folder = private_folder("x", tmp_path)
    assert folder == tmp_path / f"{PREFIX}-{os.getuid()}-x"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder("x", tmp_path) == folder


@pytest.mark.parametrize("what", ["open to others", "a link", "a file", "of another user"])
def test_what_may_be_another_ones_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder("x", tmp_path)
    if what == "open to others":
        folder.chmod(0o770)
    elif what == "of another user":
        user = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: user)
    else:
        folder.rmdir()
        if what == "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            folder.write_text("")
    with pytest.raises(ValueError, match=r"is not a folder of user \d+ with mode 700: .* set TMPDIR"):
        private_folder("x", tmp_path)


def test_only_dead_runs_of_others_are_swept(tmp_path: Path) -> None:
    here, gone = os.getpid(), (2**22 + 1, 1)  # above the largest process id
    for name, (pid, start) in {"alive": (here, born(here)), "dead": gone, "mine": gone, "another": (here, 1)}.items():
        page = Page.create(private_folder(name, tmp_path) / "page", 2)
        StatusRecord(page, 1, "h", pid, start)
    Page.create(private_folder("young", tmp_path) / "page", 2)
    (private_folder("odd", tmp_path) / "page").write_text("?")
    sweep(tmp_path, "mine")
    left = {path.name.rpartition("-")[2] for path in tmp_path.iterdir()}
    assert left == {"alive", "mine", "young", "odd"}


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
    page = Page.create(tmp_path / "page", 2)
    monkeypatch.setenv(WATCH, str(tmp_path))
    watch_joined(comm)
    assert (page.read(1).pid, page.read(1).state) == (os.getpid(), "starting")
    comm.close()
    assert page.read(1).state == "done"
    assert page.path.exists()
