"""Text, documents and tokens come from the named place, in one order, or not at all; the last are held out."""

import ast
import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.run.commands.main import main
from plait.run.config.check import validate
from plait.run.config.settings import TrainConfig
from plait.run.data import text as text_module
from plait.run.data.text import load_documents, load_text, split_documents, split_text
from plait.run.data.tokens import Tokens, load_tokens, token_files
from plait.run.data.windows import TextBatches
from plait.run.job.config import JobConfig
from plait.run.job.dataset import make_data


def test_without_a_path_it_is_pythons_own_source() -> None:
    text = load_text(None)
    assert text == load_text()
    assert 1_000_000 < len(text) <= text_module.STANDARD_LIBRARY_BYTES
    folder = Path(sysconfig.get_path("stdlib"))
    assert text.startswith((folder / "abc.py").read_bytes())
    assert (folder / "argparse.py").read_bytes() in text
    ast.parse(text[: len((folder / "abc.py").read_bytes())])
    assert text.count(b"\ndef ") > 500 and b"\0" not in text


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


ROW = [int(n) for n in np.random.default_rng(0).integers(0, 200, 400)]


def write(folder: Path, name: str, row: list[int] = ROW, dtype: str = "uint16") -> str:
    file = folder / name
    numbers = np.array(row, dtype)
    if file.suffix == ".npy":
        np.save(file, numbers)
    else:
        numbers.tofile(file)
    return str(file)


@pytest.mark.parametrize("kind", [".npy", ".bin"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_every_kind_has_the_samples_of_the_same_text(tmp_path: Path, kind: str, dtype: str) -> None:
    vocab = 256 if dtype == "uint16" else 70_000
    data = make_data(JobConfig(data=write(tmp_path, f"a{kind}", dtype=dtype), length=8, vocab=vocab))
    batch, text = data.batches.samples(3, 0, 16, 16), TextBatches(bytes(ROW[:-20]), 8, 0).samples(3, 0, 16, 16)
    assert all(batch[name].dtype == torch.int64 and torch.equal(batch[name], text[name]) for name in text)
    assert data.held_out is not None and data.held_out.samples(0, 0, 1, 1)["tokens"].tolist() == [ROW[-20:-12]]
    assert data.digest() != make_data(JobConfig(data=write(tmp_path, f"b{kind}", ROW[::-1]), length=8)).digest()


def test_shards_are_one_row_across_their_ends(tmp_path: Path) -> None:
    for number, part in enumerate(np.split(np.array(ROW), [7, 7, 31])):
        write(tmp_path, f"{number:03}.npy", part.tolist(), "int64")
    row = load_tokens(token_files(str(tmp_path)), 256)
    assert len(row) == 400 and row.long().tolist() == ROW
    for part in (slice(3, 40), slice(-9, None), slice(None, -380), slice(31, 31)):
        assert row[part].long().tolist() == ROW[part] and row[part][2:5].long().tolist() == ROW[part][2:5]
    assert all(shard.dtype == torch.int64 for shard in row.shards) and isinstance(row[1:2], Tokens)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("large.npy", {"row": [1, 300] * 40}, "the data has token 300, but the model's vocabulary ends at 255: give"),
        ("negative.npy", {"row": [1, -100] * 40, "dtype": "int32"}, "the data has token -100, which is negative: give"),
        ("two.npy", {"row": [[1, 2], [3, 4]]}, "it has uint16 [2, 2]: give one row of whole numbers"),
        ("real.npy", {"dtype": "float32"}, "it has float32 [400]"),
        ("odd.bin", {"dtype": "uint8", "row": [1] * 401}, "cannot read the tokens in"),
        ("pickled.npy", {"row": [{}], "dtype": "object"}, "cannot read the tokens in"),
        ("none.bin", {"row": []}, "it is empty"),
        ("short.npy", {"row": [1, 2, 3]}, "a text of 3 tokens is too short"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused(tmp_path: Path, name: str, settings: Any, says: str) -> None:
    file = write(tmp_path, name, **settings)
    with pytest.raises(ValueError) as refused:
        validate(TrainConfig(data=file, length=8, batch=4))
    assert says in str(refused.value)
    with pytest.raises(ValueError, match=r"pack is for text, which has documents"):
        validate(TrainConfig(data=file, length=8, pack=True))


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 43}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": False}


def test_a_folder_with_only_a_config_is_trained_from_scratch_on_bytes_or_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "text").write_bytes(bytes(ROW).replace(b"\0", b"\1"))
    sizes = ["--model", f"hf:{tmp_path}", "--length", "8", "--steps", "2", "--mesh", "shard=2"]
    for data in (str(tmp_path / "text"), write(tmp_path, "a.npy")):
        assert main(["verify", *sizes, "--data", data]) == 0
        assert "verdict: bitwise" in capsys.readouterr().out
    assert main(["train", *sizes, "--data", data, "--world", "thread", "--export", str(tmp_path / "new")]) == 0
    assert "initial values are drawn: the folder has no weights; each byte is a token" in capsys.readouterr().out
    assert (tmp_path / "new" / "model.safetensors").exists()
    assert main(["explain", "--model", f"hf:{tmp_path}"]) == 0
