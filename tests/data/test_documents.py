"""Documents by the kind of source, and those that are held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from plait.run.data.text import load_documents, load_text, split_documents


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
