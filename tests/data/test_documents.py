"""Text and documents come from the named place, in one order, or not at all; the last are held out."""

from __future__ import annotations

import ast
import json
import re
import sysconfig
from pathlib import Path

import pytest
import torch

from plait.run.data import text as text_module
from plait.run.data.text import load_documents, load_text, split_documents, split_text


def test_without_a_path_it_is_pythons_own_source() -> None:
    text = load_text(None)
    assert text == load_text()
    assert 1_000_000 < len(text) <= text_module.STANDARD_LIBRARY_BYTES
    folder = Path(sysconfig.get_path("stdlib"))
    assert text.startswith((folder / "abc.py").read_bytes())
    assert (folder / "argparse.py").read_bytes() in text
    ast.parse(text[: len((folder / "abc.py").read_bytes())])
    assert text.count(b"\ndef ") > 500 and b"\0" not in text


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("grün\r\n".encode())
    assert load_text(str(tmp_path / "a.txt")) == "grün\r\n".encode()


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"B",
        "a/z.txt": b"A/Z",
        "a/b/c.md": b"A/B/C",
        "c.bin": b"\0binary",
        ".git/config": b"hidden",
        ".hidden": b"hidden",
        "z.py": b"Z",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert load_text(str(tmp_path)) == b"A/B/C" + b"A/Z" + b"B" + b"Z"


def test_what_is_no_text_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.bin").write_bytes(b"\0")
    (tmp_path / "nothing").mkdir()
    for name, words in {
        "missing": "no file or folder at .*check the path",
        "empty.txt": r"empty \(0 bytes\): give a file",
        "binary": "NUL byte.*give plain text",
        "folder": "no text: 1 files, 1 of them binary, 0 bytes of text; give a folder",
        "nothing": "no text: 0 files",
    }.items():
        with pytest.raises(ValueError, match=words) as error:
            load_text(str(tmp_path / name))
        assert re.search(re.escape(name), str(error.value))


@pytest.mark.parametrize("size, length, held_out", [(1000, 4, 50), (1000, 99, 100), (200, 99, 100), (10, 4, 5)])
def test_the_end_is_held_out(size: int, length: int, held_out: int) -> None:
    text = bytes(i % 256 for i in range(size))
    train, rest = split_text(text, length)
    assert train + rest == text
    assert len(rest) == held_out


def test_a_text_too_short_to_split_names_sizes_and_fix() -> None:
    with pytest.raises(ValueError) as error:
        split_text(b"x" * 9, 4)
    words = ["text of 9 bytes", "length 4 need 10 bytes", "length of at most 3"]
    assert all(word in str(error.value) for word in words), str(error.value)
    split_text(b"x" * 9, 3)


def lines(*values: object) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def test_a_files_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\ntwo\n\n\nthree\r\n\r\nfour\n  \t\nfive \n\n")
    assert load_documents(str(path)) == [b"one\ntwo", b"three", b"four", b"five "]


def test_the_lines_of_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines({"text": "grün\n\nund", "id": 3}, {"text": ""}) + b"\n" + lines({"text": "blau"}))
    assert load_documents(str(path)) == ["grün\n\nund".encode(), b"blau"]
    assert load_text(str(path)) == "grün\n\nund\n\n\n\nblau".encode()


def test_a_folder_has_both(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"one\n\ntwo")
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "A"}, {"text": "B"}))
    (tmp_path / "empty.txt").touch()
    assert load_documents(str(tmp_path)) == [b"A", b"B", b"one\n\ntwo"]
    assert load_text(str(tmp_path)) == b"A\n\nB\n\n" + b"one\n\ntwo"


def test_pythons_modules() -> None:
    documents = load_documents()
    assert b"".join(documents) == load_text()
    assert len(documents) > 30 and all(documents)


@pytest.mark.parametrize(
    "content, words",
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2 has no text \(JSONDecodeError"),
        (b'{"text": "a"}\n' + b"[" * 100_000, r"a\.jsonl, line 2 has no text \(RecursionError"),
        (b'{"text": "\\ud800"}', r"a\.jsonl, line 1 has no text \(UnicodeEncodeError"),
        (b'{"text": "a"}\n\n["text"]\n', r"a\.jsonl, line 3 has no text"),
        (b'{"texts": "a"}\n', r"line 1 has no text .*: give a JSON object a line"),
        (b'{"text": 3}\n', r"line 1 has no text"),
        (b'{"text": ""}\n', r"holds no text"),
    ],
)
def test_lines_that_are_not_what_they_should_be(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    for load in (load_documents, load_text):
        with pytest.raises(ValueError, match=words):
            load(str(tmp_path / "a.jsonl"))


def test_the_last_documents_are_held_out() -> None:
    documents = [b"x" * size for size in (300, 400, 1, 250, 30, 0, 20)]
    train, rest = split_documents(documents)  # 5 % of 1,000 tokens
    assert [len(d) for d in train] == [300, 400, 250] and [len(d) for d in rest] == [30, 20]
    train, rest = split_documents([b"ab", b"c" * 1000])
    assert [len(d) for d in train] == [2] and [len(d) for d in rest] == [1000]
    rows = [torch.arange(size) for size in (50, 2)]
    assert [len(part[0]) for part in split_documents(rows)] == [50, 2]
    with pytest.raises(ValueError, match=r"1 documents of 2 tokens or more: .*leave pack out"):
        split_documents([b"abc", b"d"])
