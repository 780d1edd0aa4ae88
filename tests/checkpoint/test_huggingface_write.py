"""An exported folder is what transformers would have written: the same tensors, config, tokenizer, and our logits."""

from __future__ import annotations

import json
from pathlib import Path

import hf_folders as folders
import pytest
import torch
from each_rank import each_rank
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.run.formats.huggingface import write_folder, write_tensors
from plait.run.models import hf
from plait.step import Engine, empty_parameters

pytest.importorskip("transformers")

TOKENS = torch.arange(4 * 16).view(4, 16) * 5 % 259
BATCH = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}

LAYOUTS = ("shard=3", "replica=2 shard=2", "shard=2 tensor=2", "pipe=2 shard=2", "pipe=2 tensor=2")


def train(folder: Path, mesh: str, out: Path, row: str = "zero3") -> list[dict[str, Tensor]]:
    """One step from the folder's weights, then the export; every rank's whole state."""

    def body(comm: Comm) -> dict[str, Tensor]:
        engine = folders.engine_of(folder, comm, row, 0.1)
        rank, ranks = comm.data_rank, comm.mesh.data_size
        mine = {name: value[rank::ranks] for name, value in BATCH.items()}
        engine.step([{name: value[i : i + 1] for name, value in mine.items()} for i in range(len(mine["tokens"]))][:1])
        write_folder(out, engine, folder)
        return engine.full_state_dict()

    return plait.run_threads(mesh, body)


@pytest.mark.parametrize("mesh", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_reads_what_was_trained(tmp_path: Path, kind: str, mesh: str) -> None:
    folder = folders.write(tmp_path / "model", kind, tie=kind == "llama")
    state, *_ = train(folder, mesh, tmp_path / "deep" / "out")
    before, after = folders.load(folder), folders.load(tmp_path / "deep" / "out")
    assert list(after.state_dict()) == list(state)
    assert all(torch.equal(after.state_dict()[name], value) for name, value in state.items())
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight), "it was trained"
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["out"], "nothing of the making is left"


def test_the_files_are_those_of_transformers(tmp_path: Path) -> None:
    folder, out = folders.write(tmp_path / "model", "gpt2", tie=True), tmp_path / "out"
    (folder / "LICENSE").write_text("as it was")
    train(folder, "shard=2", out)
    theirs = folders.load(out)
    theirs.save_pretrained(tmp_path / "theirs")
    written = {file.name for file in out.iterdir()}
    assert written == {file.name for file in folder.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    ours, other = (json.loads((f / "config.json").read_text()) for f in (out, tmp_path / "theirs"))
    assert ours == other
    from safetensors import safe_open

    with safe_open(out / "model.safetensors", "pt") as a, safe_open(tmp_path / "theirs/model.safetensors", "pt") as b:
        assert a.metadata() == b.metadata() == {"format": "pt"}
        assert set(a.keys()) == set(b.keys()), "a tied weight once"
        assert all(torch.equal(a.get_tensor(key), b.get_tensor(key)) for key in a.keys())  # noqa: SIM118


def test_a_model_from_sizes_is_exported_without_a_tokenizer(tmp_path: Path) -> None:
    def body(comm: Comm) -> dict[str, Tensor]:
        sizes = hf.HFConfig(vocabulary=19, num_layers=2, width=12, num_heads=2, num_kv_heads=1, kind="llama")
        with empty_parameters():
            model = hf.build(sizes)
        engine = Engine(model.to(torch.bfloat16), comm)
        write_folder(tmp_path / "out", engine)
        return engine.full_state_dict()

    state, *_ = plait.run_threads("shard=2", body)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    loaded = folders.transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], value) and value.dtype == torch.bfloat16 for name, value in state.items())
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {
        "whole": torch.arange(7),
        "narrow": torch.arange(5).to(torch.bfloat16),
        "wide": torch.arange(6.0).view(2, 3),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "large": torch.arange(40.0).view(4, 10),
        "flags": torch.tensor([True, False, True]),
    }
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    write_tensors(tmp_path, shapes, reversed(tensors.items()), limit=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert len({*index["weight_map"].values()}) == 3
    assert sorted(f.name for f in tmp_path.glob("*.safetensors")) == sorted({*index["weight_map"].values()})
    for name, value in tensors.items():
        with safe_open(tmp_path / index["weight_map"][name], "pt") as file:
            found = file.get_tensor(name)
        assert found.dtype == value.dtype
        assert torch.equal(found, value)


def test_a_folder_that_is_there_is_not_touched_and_a_broken_one_is_made_anew(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "model", tie=True)
    with pytest.raises(ValueError, match=r"model' exists already: export to a new folder"):
        train(folder, "shard=1", folder)
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "half").write_text("")
    train(folder, "shard=2", tmp_path / "out")
    assert not left.exists()
    assert not (tmp_path / "out/half").exists()


@each_rank("shard=1", refused="Linear has no config of transformers")
def test_a_model_of_ones_own_has_no_folder(comm: Comm, tmp_path: Path) -> None:
    write_folder(tmp_path / "out", Engine(nn.Linear(2, 2), comm))
