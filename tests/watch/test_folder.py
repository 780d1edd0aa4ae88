"""The private folder of a host's ranks: whose it must be, when it goes, and what is swept."""

import errno
import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from plait.comm import ThreadWorld
from plait.run.watch.folder import PREFIX, WATCH, locked_folder, private_folder
from plait.run.watch.joined import watch_joined
from plait.run.watch.page import Page
from plait.table.mesh import Mesh


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def place_of(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{PREFIX}-{os.getuid()}-{name}"


def test_it_is_this_users_alone_and_gone_with_its_launcher(own_place: Path) -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "store").write_text("x")
        with private_folder() as another:
            assert another != folder
        assert (folder / "store").exists()
    assert list(own_place.iterdir()) == []


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
        locked_folder("x")


def test_one_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: user)
    with pytest.raises(ValueError, match=rf"is not a folder of user {user} with mode 700"):
        locked_folder("x")


def test_the_kernel_takes_the_locks_from_ranks_that_are_killed() -> None:
    awake, told = os.pipe()
    ranks = []
    for _ in range(2):  # of one run
        ranks.append(os.fork())
        if not ranks[-1]:
            try:
                signal.alarm(100)
                locked_folder("run")
                os.write(told, b"x")
                time.sleep(100)
            finally:
                os._exit(1)
    os.close(told)
    assert [os.read(awake, 1) for _ in ranks] == [b"x", b"x"]
    for rank in ranks:
        with private_folder():
            assert place_of("run").exists()
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    with private_folder():
        assert not place_of("run").exists()


def test_only_what_plait_left_is_removed(own_place: Path) -> None:
    left, file, link, users = place_of("left"), place_of("file"), place_of("link"), own_place / "plait-of-the-user"
    for folder in (left, users):
        folder.mkdir()
        (folder / "store").write_text("x")
    file.write_text("x")
    link.symlink_to(users)
    with private_folder():
        assert {path.name for path in own_place.iterdir()} >= {file.name, users.name, link.name}
        assert not left.exists()
    assert (users / "store").exists()


def test_one_that_a_sweeper_removes_first_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    flock, removed = fcntl.flock, []

    def later(lock: int, kind: int) -> None:
        if kind == fcntl.LOCK_SH and not removed:
            removed.append(place_of("x"))
            shutil.rmtree(place_of("x"))
        flock(lock, kind)

    monkeypatch.setattr(fcntl, "flock", later)
    folder, lock = locked_folder("x")
    assert removed == [folder] and os.path.samestat(os.fstat(lock), folder.stat())
    os.close(lock)


def test_where_there_are_no_locks_nothing_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(lock: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    place_of("left").mkdir()
    monkeypatch.setattr(fcntl, "flock", none)
    with private_folder() as folder:
        assert folder.exists() and place_of("left").exists()
    assert not folder.exists()


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
