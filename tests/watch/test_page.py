"""The status page: what is written is read, readers never block, and nothing on it is trusted."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from plait.run.watch.page import HEADER, PEERS, RECENT, RECORD, Page, Status, StatusRecord, about


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page.create(tmp_path / "page", 3)


def test_a_record_is_read_as_it_was_written(page: Page) -> None:
    record = StatusRecord(page, 1, "host a", 4711, 12)
    record.begins(7, None)
    record.asks(about("forward", "all_gather of unit 'blocks.3'", [0, 1, 2]))
    record.waits()
    waiting = Page.open(page.path).read(1)
    assert (waiting.rank, waiting.host, waiting.pid, waiting.born) == (1, "host a", 4711, 12)
    assert (waiting.state, waiting.step, waiting.phase, waiting.count) == ("waiting", 7, "forward", 1)
    assert (waiting.operation, waiting.peers) == ("all_gather of unit 'blocks.3'", (0, 1, 2))
    assert 0 <= time.monotonic() - waiting.since < 60
    record.waited(0.25)
    record.begins(8, (1.0, 0.25))
    after = page.read(1)
    assert (after.state, after.step, after.waited, after.steps, after.finished) == (
        "running",
        8,
        0.25,
        ((1.0, 0.25),),
        1,
    )
    record.ends("failed", "ValueError: no")
    assert (page.read(1).state, page.read(1).error, page.failed(1)) == ("failed", "ValueError: no", True)
    assert page.read(0) == Status(0)
    assert [status.pid for status in page.read_all()] == [0, 4711, 0]


def test_the_last_steps_are_kept_oldest_first(page: Page) -> None:
    record = StatusRecord(page, 0, "", 1, 0)
    for step in range(RECENT + 5):
        record.begins(step, (float(step), 0.0) if step else None)
    read = page.read(0)
    assert read.finished == RECENT + 4
    assert [computed for computed, _ in read.steps] == [float(n) for n in range(5, RECENT + 5)]


def test_a_wish_to_stop_is_seen_by_all(page: Page) -> None:
    assert page.stop == 0
    Page.open(page.path).ask_to_stop(10)
    assert page.stop == 10


def test_a_reader_never_sees_two_records_in_one(page: Page) -> None:
    record, letters = StatusRecord(page, 0, "", 1, 0), "abcdefgh"
    texts = [about(c, c * 200, [n] * 60) for n, c in enumerate(letters)]
    end, seen = time.monotonic() + 1, set[str]()
    writer = os.fork()
    while not writer:
        for text in texts[1:] + texts[:1]:  # the letter follows from the count
            record.asks(text)
    try:
        while time.monotonic() < end or len(seen) < 2:
            read = page.read(0)
            if read.count and read.whole:  # the writer may lose its core within a write
                letter = letters[read.count % len(letters)]
                assert (read.phase, read.operation) == (letter, letter * 200)
                assert read.peers == (letters.index(letter),) * 60
                seen.add(letter)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


def test_a_write_in_the_middle_of_a_copy_is_noticed(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    record, copies = StatusRecord(page, 0, "", 1, 0), list[bytes]()
    record.asks(about("old", "old", [0]))

    def copy(view: memoryview) -> bytes:
        before = bytes(view)
        if not copies:
            record.asks(about("new", "new", [0, 1]))
        copies.append(before[:160] + bytes(view)[160:])
        return copies[-1]

    monkeypatch.setattr("plait.run.watch.page.bytes", copy, raising=False)
    read = page.read(0)
    assert (read.phase, read.operation, read.peers, read.count, read.whole) == ("new", "new", (0, 1), 2, True)
    assert len(copies) == 2


def test_a_rank_killed_within_a_write_is_read_and_said_to_be(page: Page) -> None:
    record = StatusRecord(page, 0, "host", 1, 0)
    record.asks(about("forward", "barrier", [0, 1]))
    record._words[0] += 1
    read = page.read(0)
    assert not read.whole
    assert read.operation == "barrier"
    again = StatusRecord(page, 0, "host", 2, 0)  # another process takes the record over
    again.begins(0, None)
    assert page.read(0).whole


def test_texts_are_cut_and_escaped(page: Page) -> None:
    record = StatusRecord(page, 0, "\x1b]0;host\x07", 1, 0)
    record.asks(about("x" * 100, "é" * 500 + "\n\x1b[2J", range(1000)))
    record.ends("failed", "A\r\nB\x00C")
    read = page.read(0)
    assert read.host == "\\x1b]0;host\\x07"
    assert read.phase == "x" * 32
    assert set(read.operation) <= {"é", "\N{REPLACEMENT CHARACTER}"}
    assert read.error == "A\\r\\nB\\x00C"
    assert read.peers == tuple(range(PEERS))


def test_noise_is_read_as_data(page: Page) -> None:
    draw = random.Random(3)
    for _ in range(300):
        noise = bytearray(draw.randbytes(RECORD))
        noise[0] &= 0xFE
        page.record(2)[:] = noise
        read = page.read(2)
        shown = read.host + read.phase + read.operation + read.error
        assert not [c for c in shown if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0]


@pytest.mark.parametrize(
    "content", [b"", b"plait page 1", b"\0" * (HEADER + RECORD), b"plait page 1\0\0\0\0" + b"\xff" * 999]
)
def test_another_file_is_no_page(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x\x1b[2J"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\\x1b\[2J of \d+ bytes is no status page"):
        Page.open(file)


def test_it_is_made_once_and_links_are_not_followed(page: Page, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        Page.create(page.path, 3)
    assert sorted(os.listdir(tmp_path)) == ["page"]
    (tmp_path / "link").symlink_to(page.path)
    with pytest.raises(OSError, match="symbolic"):
        Page.open(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="seek"):
        Page.open(tmp_path / "fifo")
    assert page.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="rank 3 is not on a page of 3 ranks"):
        page.read(3)
