"""Files of tokens: mapped, end to end, and the run of the same text as bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.run.commands.main import main
from plait.run.config.check import validate
from plait.run.config.settings import TrainConfig
from plait.run.data.tokens import Tokens, load_tokens, token_files
from plait.run.data.windows import TextBatches
from plait.run.job.config import JobConfig
from plait.run.job.dataset import make_data

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
