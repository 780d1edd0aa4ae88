"""The status page and its private folder: entries are complete or not read at all, and nothing on it is trusted."""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.comm import ThreadWorld
from plait.run.watch.joined import shared_folder, watch_joined
from plait.run.watch.page import SLOT, WATCH, Page, Status
from plait.run.watch.rank import RECENT
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


WAITS = Status(1, "host a", 4711, "waiting", 7, "all_gather", 5.5, 6.5, [[1.0, 0.25]], 1, [0, 1, 2], 12)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    page = Page(tmp_path, 3)
    page.write(WAITS)
    assert Page(tmp_path, 3).read_all() == [Status(0), WAITS, Status(2)]
    page.begins(1, 8)
    assert page.read(1) == replace(WAITS, step=8)
    assert not page.failed
    page.write(Status(2, "host a", 4712, "failed", error="ValueError: no"))
    assert page.failed and page.read(2).error == "ValueError: no"


def test_a_wish_to_stop_is_seen_by_all(tmp_path: Path) -> None:
    assert Page(tmp_path, 3).stop == 0
    Page(tmp_path, 3).ask_to_stop(signal.SIGUSR1)
    assert Page(tmp_path, 3).stop == 10


def test_a_reader_never_sees_two_records_in_one(tmp_path: Path) -> None:
    page, end, seen = Page(tmp_path, 1), time.monotonic() + 0.5, set[str]()
    writer, step = os.fork(), 0
    while not writer:
        step += 1
        page.write(Status(0, pid=1, finished=step, operation="abcdefgh"[step % 8] * 200))
    try:
        while time.monotonic() < end or len(seen) < 2:
            if (read := page.read(0)).pid:
                seen.add(read.operation)
                assert read.operation == "abcdefgh"[read.finished % 8] * 200
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


@pytest.mark.parametrize("text", ["", "{", "[" * 9999, "null", '{"rank": 0}', '"state": "dancing"', '"pid": null'])
def test_noise_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    page, good = Page(tmp_path, 2), json.dumps(vars(WAITS))
    for wrong in ('"state": "waiting"', '"pid": 4711'):
        written = good.replace(wrong, text) if text.startswith('"') else text
        monkeypatch.setattr(json, "dumps", lambda given, written=written: written)
        page.write(WAITS)
    assert page.read(1) == Status(1)


def test_half_a_record_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    page, draw = Page(tmp_path, 2), random.Random(3)
    for _ in range(3):
        page.write(WAITS)
        page.write(replace(WAITS, operation="another"))
        start = SLOT * (3 + page._slot) + 8 + draw.randrange(100)
        page._memory[start : start + 99] = draw.randbytes(99)
        assert page.read(1) == WAITS


def test_a_long_record_is_cut_and_read(tmp_path: Path) -> None:
    page, steps = Page(tmp_path, 1), [[123.456789, 123.456789]] * RECENT
    page.write(Status(0, "h" * 64, 2**31, operation="é" * 999, steps=steps, peers=list(range(999)), error="\x1b" * 999))
    read = page.read(0)
    assert (len(read.operation), len(read.error), len(read.peers), read.steps) == (200, 300, 63, steps)


def test_without_its_folder_nothing_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Page(tmp_path / "gone", 1)
    (folder := tmp_path / "folder").mkdir()
    page = Page(folder, 1)
    assert os.listdir(folder) == ["page"]
    shutil.rmtree(folder)
    page.write(Status(0, state="failed"))
    assert page.failed
