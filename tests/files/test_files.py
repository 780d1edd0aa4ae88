"""Files are read and written whole, or refused in a line."""

import errno
import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disks import mount, small_disk

from plait.checkpoint.files.reading import LARGEST_TEXT, read_file, read_text, shown
from plait.checkpoint.files.writing import DiskError, Lines, check_file, check_folder, told, write_text
from plait.run.config.check import validate
from plait.run.config.file import from_toml
from plait.run.config.layout import read_schedule
from plait.run.config.settings import TrainConfig
from plait.run.data.text import load_text
from plait.run.formats.huggingface import open_folder
from plait.run.job.own import load_job

UNREADABLE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a loop": lambda place: place.symlink_to(place),
    "a device": lambda place: place.symlink_to("/dev/zero"),
    "a device that is full": lambda place: place.symlink_to("/dev/full"),
    "nothing": lambda place: place,
    "a link to nothing": lambda place: place.symlink_to("nowhere"),
    "too large": lambda place: (place.touch(), os.truncate(place, 1 << 42)),
}

READERS: dict[str, Callable[[str], object]] = {
    "bytes": lambda path: read_file(path, "the file"),
    "a config": lambda path: from_toml(TrainConfig, path),
    "a schedule": read_schedule,
    "a job": lambda path: load_job(f"{path}:job"),
    "a text": lambda path: (validate(TrainConfig(data=path)), load_text(path)),
    "a text, on a rank": load_text,
    "weights": lambda path: open_folder(Path(path).parent, None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("odd", UNREADABLE)
@pytest.mark.parametrize("reader", READERS)
def test_it_is_refused_at_once(reader: str, odd: str, tmp_path: Path) -> None:
    if (reader, odd) in (("a text", "a folder"), ("a text, on a rank", "a folder")):
        pytest.skip("a folder of text is read, and said to be empty, elsewhere")
    place = tmp_path / {"a job": "job.py", "weights": "model.safetensors"}.get(reader, "file")
    UNREADABLE[odd](place)
    with pytest.raises(ValueError) as caught:
        READERS[reader](str(place))
    named = str(tmp_path), repr(os.path.realpath(place))  # weights name the end of a link
    assert any(name in str(caught.value) for name in named) and str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "n/" * 5000])
@pytest.mark.parametrize("reader", READERS)
def test_names_that_cannot_be_are_refused(reader: str, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        READERS[reader](name)
    assert reader not in ("bytes", "a config", "a schedule") or len(str(caught.value)) < 600


def test_what_is_plain_is_read_past_a_link_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link", "the file", 10) == b"0123456789"
    assert read_file("/proc/self/status", "the status").startswith(b"Name:")  # says that it has 0 bytes
    with pytest.raises(ValueError, match=r"cannot read the file .*link': it has more than 9 bytes"):
        read_file(tmp_path / "link", "the file", 9)
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="no UTF-8 text"):
        read_text(tmp_path / "file", "the file")
    assert LARGEST_TEXT == 1 << 24


SAYS = re.compile(r"\[Errno \d+\] .*; need \d+ bytes, have \d+ bytes: '.*'")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 KiB."""
    with small_disk(tmp_path / "disk", "16k") as place:
        yield place


def fill(disk: Path) -> None:
    with open(disk / "fill", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 1000)


def test_a_line_is_whole_or_not_there(disk: Path) -> None:
    lines = Lines(disk / "metrics.jsonl")
    written = 0
    with pytest.raises(DiskError) as caught:
        for written in range(1000):
            lines.write(json.dumps({"step": written, "more": "x" * 70}))
    assert SAYS.fullmatch(str(caught.value)) and caught.value.errno == errno.ENOSPC
    data = (disk / "metrics.jsonl").read_text()
    assert data.endswith("\n") and [json.loads(line)["step"] for line in data.splitlines()] == list(range(written))
    lines.close()


def test_a_text_takes_the_place_of_another_or_leaves_it(disk: Path) -> None:
    write_text(disk / "a.json", "one")
    write_text(disk / "a.json", "two")
    fill(disk)
    with pytest.raises(DiskError, match=r"No space left on device; need 9000 bytes, have 0 bytes: '.*a.json'"):
        write_text(disk / "a.json", "x" * 9000)
    assert (disk / "a.json").read_text() == "two" and sorted(os.listdir(disk)) == ["a.json", "fill"]


def test_no_place_of_a_full_or_read_only_disk_is_accepted(disk: Path) -> None:
    fill(disk)
    for check in (lambda path: check_file("json", path), lambda path: check_folder("out", path)):
        with pytest.raises(ValueError, match=r"No space left on device, 0 bytes are free"):
            check(str(disk / "new"))
    assert not mount("-o", "remount,ro", str(disk))
    with pytest.raises(ValueError, match=r"nothing can be written in .* \(Read-only file system"):
        check_file("json", str(disk / "new"))


def test_what_needs_more_room_than_there_is_is_refused(disk: Path) -> None:
    check_folder("out", str(disk / "a" / "b"), need=16_000)
    with pytest.raises(ValueError, match=r"out '.*': need 17,000 bytes, have 16,384 bytes"):
        check_folder("out", str(disk / "a" / "b"), need=17_000)
    assert os.listdir(disk) == [], "nothing is left of the attempt"


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """By a limit of the shell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(DiskError, match="File too large; need 99 bytes"):
            write_text(tmp_path / "a", "x" * 99)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    lines.write("{}")
    assert other(Lines, path) == errno.EAGAIN
    lines.cut(0)
    assert other(Lines, path) == errno.EAGAIN and path.read_bytes() == lines.read() == b""
    read, write = os.pipe()
    if not (fork := os.fork()):  # a worker, which outlives the run
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    lines.close()
    assert other(Lines, path) == 0
    os.close(write)
    os.waitpid(fork, 0)


def other(opened: Callable[[Path], object], path: Path) -> int:
    """Runs the same in another process; returns its exit code."""
    if not (pid := os.fork()):
        try:
            opened(path)
        except ValueError as error:
            os._exit(errno.EAGAIN if "another run is writing to it" in str(error) else 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("odd", sorted({*UNREADABLE} - {"nothing", "too large"}))
def test_odd_files_are_refused(odd: str, tmp_path: Path) -> None:
    UNREADABLE[odd](tmp_path / "a.json")
    with pytest.raises(ValueError, match="no plain file"):
        check_file("json", str(tmp_path / "a.json"))
    with pytest.raises(ValueError, match="no plain file"):
        check_folder("out", str(tmp_path), ["a.json"])
    if odd != "a folder":
        for path in ("a.json", "a.json/below"):
            with pytest.raises(ValueError):
                check_folder("out", str(tmp_path / path))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/dev/full", "no plain file"),
        ("/proc/new", "nothing can be written in '/proc'"),
        ("no/such/a.json", "there is no such folder"),
        ("n" * 300, "File name too long"),
        ("n" * 9000, "File name too long"),
        ("a\0b", "null byte"),
    ],
)
def test_places_of_the_system(path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        check_file("json", path)
    assert (
        str(caught.value).startswith(f"json {shown(path)}")
        and len(str(caught.value)) < 600
        and "\n" not in str(caught.value)
    )


def test_a_folder_below_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, words in (
        ("file", "file' is no folder"),
        ("file/a/b", "file' is no folder"),
        ("n" * 300 + "/a", "too long"),
    ):
        with pytest.raises(ValueError, match=words):
            check_folder("out", str(tmp_path / path))
    check_folder("out", str(tmp_path / "a" / "b" / "c"), ["metrics.jsonl"])
    assert os.listdir(tmp_path) == ["file"]


def test_a_rank_that_is_late_is_no_disk(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="rank 1"), told(tmp_path / "x", 8):
        raise TimeoutError("rank 0 waits for rank 1")


def test_a_file_system_without_locks_or_room_to_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr("os.statvfs", lambda path: os.statvfs_result((4096, 4096, *[0] * 9)))
    lines = Lines(tmp_path / "metrics.jsonl")
    lines.write("{}")
    lines.close()
    check_folder("out", str(tmp_path), need=1 << 60)


def test_a_text_is_written_where_a_link_leads_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "results.json", tmp_path / "link.json"
    target.write_text("before")
    target.chmod(0o600)
    link.symlink_to(target)
    check_file("json", str(link))
    write_text(link, "after")
    assert (link.is_symlink(), target.read_text(), target.stat().st_mode & 0o777) == (True, "after", 0o600)
