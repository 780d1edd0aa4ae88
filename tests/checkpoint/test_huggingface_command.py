"""``plait train --model hf:PATH``: proved against one process, exported; every mistake is one line and exit code 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import hf_folders as folders
import pytest
import torch

from plait.run.commands.main import main

pytest.importorskip("transformers")

TEXT = ("Weights are read where they are kept, and nowhere else.\n\n" * 40).encode()


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_bytes(TEXT)
    return str(tmp_path / "text.txt")


def command(folder: Path, text: str, *more: str) -> list[str]:
    sizes = ["--length", "16", "--batch", "8", "--steps", "2", "--lr", "0.01"]
    return ["train", "--world", "thread", "--model", f"hf:{folder}", "--data", text, *sizes, *more]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", ("--mesh", "shard=3", "--strategy", "zero3")),
        ("llama", ("--mesh", "pipe=2 shard=2", "--strategy", "zero3", "--microbatches", "2")),
        ("qwen2", ("--mesh", "shard=2", "--strategy", "zero1", "--dtype", "bf16-mixed")),
        ("qwen2", ("--mesh", "tensor=2", "--strategy", "ddp", "--sequence-parallel")),
        ("gpt2", ("--mesh", "replica=2 shard=2", "--strategy", "psdp", "--pack")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1].replace(" ", ","),
)
def test_a_fine_tuning_is_one_process_and_trains_on(
    tmp_path: Path, text: str, kind: str, layout: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, report = folders.write(tmp_path / "model", kind, tie=True), tmp_path / "out", tmp_path / "report.json"
    more = ("--verify", "--export", str(out), "--json", str(report))
    assert main(command(folder, text, *layout, *more)) == 0, capsys.readouterr()
    assert json.loads(report.read_text())["equal_to_one_process"] is True
    exported = folders.load(out).state_dict()
    assert not torch.equal(exported["lm_head.weight"], folders.load(folder).state_dict()["lm_head.weight"])
    assert main(command(out, text, "--mesh", "shard=2")) == 0


def test_masters_are_exported_as_they_are_and_transformers_takes_them_so(tmp_path: Path, text: str) -> None:
    folder, out = folders.write(tmp_path / "model", "llama", tie=True), tmp_path / "out"
    assert main(command(folder, text, "--mesh", "shard=2", "--dtype", "bf16-mixed", "--export", str(out))) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    exported = folders.load(out).state_dict()["lm_head.weight"]
    assert not torch.equal(exported, exported.bfloat16().float())


def test_the_first_loss_is_that_of_transformers(tmp_path: Path, text: str) -> None:
    folder, report = folders.write(tmp_path / "model"), tmp_path / "report.json"
    (tmp_path / "text.txt").write_bytes(b"a" * 400)
    assert main(command(folder, text, "--mesh", "shard=3", "--json", str(report))) == 0
    letter = torch.full((1, 17), sorted_letters().index("a"))
    with torch.no_grad():
        logits = folders.load(folder)(input_ids=letter[:, :-1]).logits
    truth = torch.nn.functional.cross_entropy(logits[0], letter[0, 1:]).item()
    assert json.loads(report.read_text())["first_loss"] == pytest.approx(truth, rel=1e-5)


def sorted_letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda f: (f / "config.json").unlink(), "no config.json in it, so no Hugging Face model"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "neither model.safetensors nor model.saf",
        ),
        (lambda f: (f / "config.json").write_text("{"), "cannot read its config.json"),
        (lambda f: folders.change_config(f, model_type="lama"), "cannot read its config.json"),
        (
            lambda f: folders.change_config(f, model_type="vit"),
            "is of type 'vit', for which transformers has no causal",
        ),
        (lambda f: folders.change_config(f, quantization_config={"quant_method": "gptq", "bits": 4}), "are quantised"),
        (lambda f: folders.change_config(f, num_attention_heads=5), "(24) is not a multiple of the number"),
        (lambda f: folders.change_config(f, num_hidden_layers=4), "9 missing ['model.layers.3.self_attn"),
        (lambda f: folders.write_tokenizer(f, 300), "tokens up to 299, but the model's vocabulary ends at 258"),
        (lambda f: [(f / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")], "no tokenizer in it"),
    ],
)
def test_a_wrong_folder_is_refused_before_any_rank_starts(
    tmp_path: Path, text: str, wrong: Callable[[Path], object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders.write(tmp_path / "model")
    wrong(folder)
    assert main(command(folder, text)) == 2
    assert_one_line(capsys, says)


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        (b"", (), "is empty (0 bytes)"),
        (b"caf\xe9 " * 200, (), "the text is not UTF-8"),
        (TEXT, ("--length", "65"), "length is 65, but the model in"),
        (TEXT, ("--export", "."), "export '.' exists already"),
        (TEXT, ("--model", "."), "for the folder write hf:."),
        (TEXT, ("--model", "gpt", "--export", "new"), "export writes models of transformers, which gpt is not"),
    ],
)
def test_a_wrong_text_or_name_is_refused_before_any_rank_starts(
    tmp_path: Path, text: str, content: bytes, more: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(text).write_bytes(content)
    assert main(command(folders.write(tmp_path / "model"), text, *more)) == 2
    assert_one_line(capsys, says)


def assert_one_line(capsys: pytest.CaptureFixture[str], says: str) -> None:
    shown = capsys.readouterr().err
    lines = [line for line in shown.splitlines() if line.startswith("plait:")]
    assert len(lines) == 1, shown
    assert says in lines[0], shown
    assert "Traceback" not in shown
