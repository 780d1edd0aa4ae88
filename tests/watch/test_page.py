"""The status page: entries are read back complete or not at all, and nothing on it is trusted."""

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plait.run.watch.page import SLOT, Page, Status
from plait.run.watch.rank import RECENT

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
