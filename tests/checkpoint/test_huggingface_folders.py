"""A Hugging Face folder, loaded by many layouts, is what ``from_pretrained`` reads; one that is exported, what
transformers would have written."""

import json
from pathlib import Path
from typing import Any

import hf_folders as folders
import pytest
import torch
from each_rank import each_rank
from torch import Tensor, nn

import plait
from plait.checkpoint import tensor_file
from plait.comm import Comm
from plait.run.formats.huggingface import FolderWeights, open_folder, write_folder, write_tensors
from plait.run.models import hf
from plait.run.models.pretrained import Pretrained
from plait.step import Engine, empty_parameters
from plait.table.cells import find_strategy
from plait.table.region import Region
from plait.table.tensor_cut import TensorCut
from plait.tensor.pieces import piece_of
from plait.zero.state.init import materialise

pytest.importorskip("transformers")

LAYOUTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "data": [
        ("shard=4", {"strategy": "zero3"}),
        ("shard=3", {"strategy": "zero1"}),
        ("shard=3", {"strategy": "zero3", "cut": "tensor"}),
        ("replica=2 shard=2", {"strategy": "psdp"}),
    ],
    "cut": [
        ("shard=3 tensor=2", {"strategy": "zero3"}),
        ("pipe=2 shard=2 tensor=2", {"strategy": "zero2"}),
        ("pipe=2 shard=2", {"strategy": "zero3", "schedule": "zbv"}),
    ],
}
FOLDERS = [("llama", "data"), ("qwen2", "cut"), ("gpt2", "data"), ("llama", "cut"), ("qwen2", "data")]


class Counting:
    """Counts the elements of each parameter that are read, a ``Weights``."""

    def __init__(self, weights: FolderWeights) -> None:
        self.weights = weights
        self.read_elements: dict[str, int] = {}

    def fill(self, name: str, region: Region, into: Tensor) -> None:
        self.weights.fill(name, region, into)
        self.read_elements[name] = self.read_elements.get(name, 0) + into.numel()


def empty(folder: Path) -> nn.Module:
    with empty_parameters():
        return Pretrained(str(folder)).build()


def loaded(folder: Path, mesh: str, dtype: torch.dtype = torch.float32, **settings: Any) -> list[Any]:
    """On every rank: the whole state, and how many elements were read and are held at rest."""

    def body(comm: Comm) -> tuple[dict[str, Tensor], dict[str, int], int]:
        model = empty(folder).to(dtype)
        weights = Counting(open_folder(folder, model))
        engine = Engine(model, comm, weights=weights, **settings)
        held = sum(flat.rest.numel() for unit in engine.placed.units for flat in unit.flats)
        return engine.full_state_dict(), weights.read_elements, held

    return plait.run_threads(mesh, body)


def agree(state: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert list(state) == list(truth)
    for name, value in truth.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize(("tie", "files"), [(False, True), (True, False)], ids=["untied-files", "tied-file"])
@pytest.mark.parametrize(("kind", "layouts"), FOLDERS)
def test_every_layout_has_the_values_of_the_folder(
    tmp_path: Path, kind: str, layouts: str, tie: bool, files: bool
) -> None:
    folder = folders.write(tmp_path / "model", kind, tie=tie, files=files)
    assert (folder / "model.safetensors").is_file() != files
    truth = folders.load(folder).state_dict()
    for mesh, settings in LAYOUTS[layouts]:
        for state, *_ in loaded(folder, mesh, **settings):
            agree(state, truth)


@pytest.mark.parametrize("mesh", ["shard=4", "shard=2 tensor=2", "pipe=2 shard=2"])
def test_a_rank_reads_its_elements_and_nothing_else(tmp_path: Path, mesh: str) -> None:
    folder = folders.write(tmp_path, tie=True, files=True)
    parameters = dict(folders.load(folder).named_parameters())
    numel = sum(p.numel() for p in parameters.values())
    ranks = loaded(folder, mesh, strategy="zero3")
    for _, read, held in ranks:
        assert sum(read.values()) <= held < numel / 2
    every = {name: sum(read.get(name, 0) for _, read, _ in ranks) for name in parameters}
    assert all(every[name] >= p.numel() for name, p in parameters.items())


@pytest.mark.parametrize("mesh", ["shard=3", "shard=2 tensor=2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_in_memory_twice(tmp_path: Path, mesh: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read to where they stay; where they take another dtype, a few at a time."""
    read, sizes, memory = tensor_file._read, list[int](), set[int]()

    def seen(source: Any, start: int, shape: Any, region: Region, into: Tensor) -> None:
        sizes.append(into.numel())
        memory.add(into.untyped_storage().data_ptr())
        read(source, start, shape, region, into)

    monkeypatch.setattr(tensor_file, "_read", seen)
    monkeypatch.setattr(tensor_file, "MOST", 7)
    folder = folders.write(tmp_path, dtype=getattr(torch, dtype))
    truth = {name: value.float() for name, value in folders.load(folder).state_dict().items()}

    def body(comm: Comm) -> tuple[dict[str, Tensor], set[int]]:
        model = empty(folder)
        engine = Engine(model, comm, weights=open_folder(folder, model), strategy="zero3")
        own = {flat.rest.untyped_storage().data_ptr() for unit in engine.placed.units for flat in unit.flats}
        return engine.full_state_dict(), own

    ranks = plait.run_threads(mesh, body)
    for state, _ in ranks:
        agree(state, truth)
    if dtype == "float32":
        assert memory <= set().union(*(own for _, own in ranks))
    else:
        assert max(sizes) == 7


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_values_take_the_dtype_of_the_model(tmp_path: Path, stored: str, wanted: str) -> None:
    folder = folders.write(tmp_path, dtype=getattr(torch, stored))
    dtype = getattr(torch, wanted)
    truth = {name: value.to(dtype) for name, value in folders.load(folder).state_dict().items()}
    for mesh in ("shard=3", "pipe=2 shard=2"):
        for state, *_ in loaded(folder, mesh, dtype, strategy="zero3"):
            agree(state, truth)


@pytest.mark.parametrize(("mesh", "row"), [("shard=3", "zero3"), ("replica=2 shard=2", "psdp")])
def test_master_weights_are_read_without_rounding_and_what_computes_is_their_rounding(
    tmp_path: Path, mesh: str, row: str
) -> None:
    folder = folders.write(tmp_path)
    truth = folders.load(folder).state_dict()

    def body(comm: Comm) -> None:
        model = empty(folder)
        optimizer = torch.optim.AdamW(model.parameters())
        strategy = find_strategy(row).mixed("bf16")
        engine = Engine(model, comm, weights=open_folder(folder, model), strategy=strategy, optimizer=optimizer)
        agree(engine.full_state_dict(), truth)
        with engine.gathered():
            agree(dict(model.named_parameters()), {n: truth[n].bfloat16() for n, _ in model.named_parameters()})

    plait.run_threads(mesh, body)


@pytest.mark.parametrize("kind", folders.KINDS)
def test_logits_of_one_process_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = folders.write(tmp_path, kind, tie=True)
    model = empty(folder)
    materialise(model, 0, torch.device("cpu"), open_folder(folder, model))
    assert torch.equal(folders.logits(model.eval()), folders.logits(folders.load(folder)))


def test_a_folder_of_the_base_model_lacks_a_prefix(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "whole", "gpt2", tie=True)
    model = folders.load(folder)
    model.transformer.save_pretrained(tmp_path / "base")
    folders.change_config(tmp_path / "base", architectures=["GPT2LMHeadModel"])
    (state, *_), *_ = loaded(tmp_path / "base", "shard=3", strategy="zero3")
    agree(state, model.state_dict())


def test_a_tied_weight_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = folders.write(tmp_path, tie=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors.pop("model.embed_tokens.weight")
    for own in (
        {"lm_head.weight": embedding},
        {n: embedding.clone() for n in ("model.embed_tokens.weight", "lm_head.weight")},
    ):
        save_file(tensors | own, file, {"format": "pt"})
        (state, *_), *_ = loaded(folder, "shard=2", strategy="zero3")
        assert torch.equal(state["model.embed_tokens.weight"], embedding)
    save_file(tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}, file)
    with pytest.raises(ValueError, match=r"ties 'model\.embed_tokens\.weight' and 'lm_head\.weight'.*different values"):
        open_folder(folder, empty(folder))


@pytest.mark.parametrize(
    "cut",
    [
        TensorCut((7, 5), 0, 2, (7,)),
        TensorCut((12, 3), 0, 2, (8, 2, 2), grain=1),
        TensorCut((7, 5), 1, 2, (5,)),
        TensorCut((7, 6), 1, 3, (4, 2)),
        TensorCut((9,), 0, 2, (4, 5)),
    ],
    ids=str,
)
def test_rows_of_a_piece_are_blocks_of_the_whole(cut: TensorCut) -> None:
    whole = torch.arange(float(torch.Size(cut.shape).numel())).view(cut.shape)
    for index in range(cut.ways):
        piece = piece_of(whole, cut, index)
        for first in range(len(piece)):
            for last in range(first + 1, len(piece) + 1):
                rows = ((first, last), *((0, size) for size in piece.shape[1:]))
                blocks = [whole[tuple(slice(a, b) for a, b in r)] for r in cut.regions(index, rows)]
                assert torch.equal(torch.cat(blocks, cut.dim), piece[first:last]) if piece.numel() else not blocks


# ---- exported --------------------------------------------------------------------------------------------------------


TOKENS = torch.arange(4 * 16).view(4, 16) * 5 % 259
BATCH = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}

MESHES = ("shard=3", "replica=2 shard=2", "shard=2 tensor=2", "pipe=2 shard=2", "pipe=2 tensor=2")


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


@pytest.mark.parametrize("mesh", MESHES)
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
