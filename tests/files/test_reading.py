"""Files from outside must be plain and of a bounded size for every reader; nothing waits."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.checkpoint.files.reading import LARGEST_TEXT, read_file, read_text
from plait.run.config.check import validate
from plait.run.config.file import from_toml
from plait.run.config.layout import read_schedule
from plait.run.config.settings import TrainConfig
from plait.run.data.text import load_text
from plait.run.formats.huggingface import open_folder
from plait.run.job.own import load_job

ODD: dict[str, Callable[[Path], object]] = {
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


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_it_is_refused_at_once(reader: str, odd: str, tmp_path: Path) -> None:
    if (reader, odd) in (("a text", "a folder"), ("a text, on a rank", "a folder")):
        pytest.skip("a folder of text is read, and said to be empty, elsewhere")
    place = tmp_path / {"a job": "job.py", "weights": "model.safetensors"}.get(reader, "file")
    ODD[odd](place)
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
