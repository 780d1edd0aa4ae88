"""The zoo's harness: configs become small, errors get the right word, a process that dies takes one layout with it."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import plait

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "zoo"))

import catalogue
import torch
import worker
from page import page
from shrink import HEAD_DIM, HEADS, LAYERS, SPECIAL, VOCABULARY, WIDTH, shrink
from trial import Run, compare, judged
from worker import examined

ZOO = Path(catalogue.__file__).parent


def test_a_config_keeps_each_kind_of_layer() -> None:
    kinds = ["linear"] * 7 + ["full"]
    small = shrink({"num_hidden_layers": 8, "layer_types": kinds, "sparse": [True] + [False] * 7, "hidden_size": 4096})
    assert small == {
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear", "linear", "linear", "full"],
        "sparse": [True, False, False, False],
        "hidden_size": WIDTH,
    }


def test_a_configs_heads_keep_their_proportions() -> None:
    fields = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    assert shrink(fields) == {
        "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM,
    }  # fmt: skip
    state_space = {"hidden_size": 4096, "num_heads": 128, "head_dim": 64}  # twice as wide inside
    assert shrink(state_space)["num_heads"] * HEAD_DIM == 2 * WIDTH


def test_numbers_become_smaller_only_tokens_stay_apart_and_nothing_is_random() -> None:
    fields = {
        "vocab_size": 50257, "eos_token_id": 50256, "pad_token_id": 0, "num_layers": 2, "hidden_dropout": 0.1,
        "text_config": {"d_model": 512, "router_jitter_noise": 0.01},
    }  # fmt: skip
    small = shrink(fields)
    assert small["vocab_size"] == VOCABULARY and SPECIAL <= small["eos_token_id"] < VOCABULARY
    assert (small["pad_token_id"], small["num_layers"], small["hidden_dropout"]) == (0, 2, 0.0)
    assert small["text_config"] == {"d_model": WIDTH, "router_jitter_noise": 0.0}
    assert shrink({"hidden_size": 512, "num_layers": 12}, narrow=False) == {"hidden_size": 512, "num_layers": LAYERS}


def result_of(body: Any) -> str:
    with pytest.raises(Exception) as caught:
        body()
    return judged(caught.value).word


def test_only_what_plait_says_itself_is_a_refusal() -> None:
    def inside_plait() -> None:
        plait.Mesh.parse(3)  # type: ignore[arg-type]

    assert result_of(lambda: plait.Mesh.parse("shard=x")) == "refused"
    assert result_of(inside_plait) == "crash"
    assert result_of(lambda: torch.ones(2) @ torch.ones(3)) == "crash"
    assert result_of(lambda: (_ for _ in ()).throw(ValueError("not plait's"))) == "crash"


def test_a_number_that_is_off_is_wrong_and_a_nan_too() -> None:
    expected = Run([1.0], {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)})

    def word(*values: float) -> str:
        return compare(Run([1.0], {"w": torch.tensor(values, dtype=torch.float64)}), expected).word

    assert word(1.0, 2.0) == "bitwise"
    assert word(1.0, 2.0 + 1e-14) == "equal"
    assert word(1.0, 2.0 + 1e-8) == "wrong"
    assert word(1.0, float("nan")) == "wrong"
    assert compare(Run([1.1], expected.parameters), expected).word == "wrong"


def test_a_process_that_dies_or_hangs_takes_one_layout_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes once the process hangs, and none before: a busy machine may take its time."""
    hangs = tmp_path / "hangs"
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: float(hangs.exists()), sleep=time.sleep))

    def examine(entry: catalogue.Entry, layouts: Any, write: Any) -> None:
        for name in layouts:
            write(name, None)
            if name == "ddp":
                faulthandler.disable()  # its traceback is not this test's
                os.kill(os.getpid(), signal.SIGSEGV)
            if name == "pipe":
                hangs.touch()
                signal.pause()
            write(name, {"word": "bitwise"})

    monkeypatch.setattr(worker, "examine", examine)
    entry = catalogue.Entry("causal", "mine")
    [(_, row)] = examined([entry], ("ddp", "zero3", "pipe", "tensor"), tmp_path, jobs=1, deadline=1.0)
    words = {name: (row[name]["word"], row[name].get("why", "")) for name in ("ddp", "zero3", "pipe", "tensor")}
    assert words == {
        "ddp": ("crash", "died of SIGSEGV"),
        "zero3": ("bitwise", ""),
        "pipe": ("crash", "no answer in 1 s"),
        "tensor": ("bitwise", ""),
    }


def test_a_few_architectures_are_the_run_of_plain_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file, made = tmp_path / "zoo.json", tmp_path / "page.md"
    only = ["causal/gpt2", "causal/qwen3_moe", "masked/bert"]
    command = [sys.executable, str(ZOO / "main.py"), "--layouts", "ddp", "zero3", "--fsdp2", "--json", str(file)]
    done = subprocess.run([*command, "--page", str(made), "--only", *only], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert list(rows) == sorted(only)
    for name, row in rows.items():
        assert {row["ddp"]["word"], row["zero3"]["word"]} == {"bitwise"}, (name, row)
        assert not row["zero3"]["ledger"], (name, row["zero3"]["ledger"])
        assert row["fsdp2"]["word"] in ("bitwise", "equal"), (name, row["fsdp2"])
    assert "| Causal language models | 2 | 2 of 2 (100.0 %) |" in made.read_text()


def test_the_page_counts_and_gives_reasons_once() -> None:
    right = {"word": "bitwise", "why": "", "ledger": [], "once": True}
    refused = {"word": "refused", "why": "no plan", "ledger": [], "once": True}
    off = {**right, "ledger": ["predicted, not measured"]}
    rows = [
        {"kind": "causal", "name": "a", "ddp": right, "tensor": refused},
        {"kind": "causal", "name": "b", "ddp": off, "tensor": refused},
        {"kind": "masked", "name": "c", "ddp": {**right, "once": False}},
        {"kind": "masked", "name": "d", "not built": "no such module"},
    ]
    text = page(rows, "versions")
    assert "| Causal language models | 2 | 2 of 2 (100.0 %) | 0 of 2 (0.0 %), 2 refused |" in text
    assert "| b | bitwise* | refused [1](#why-not) |" in text
    assert "| c | bitwise (*) |" in text
    assert "1. no plan" in text and "- masked/d: no such module" in text
