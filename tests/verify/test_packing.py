"""Packed documents, and epochs whose last batch is too small for its parts: still the single process's run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verify_cases import verify

from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import make_job

GPT = VerifyConfig(
    model="gpt", layers=2, width=24, heads=6, kv_heads=6, batch=13, length=9, steps=2, clip=0.3, pack=True
)
LLAMA = replace(GPT, model="llama", layers=3, width=32, heads=8, kv_heads=4, dropout=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """31 documents of 3 to 33 bytes, most of them shorter than two rows."""
    root: Path = tmp_path_factory.mktemp("documents")
    for i in range(31):
        size = 3 + i * 17 % 31
        (root / f"{i:02}.txt").write_bytes(bytes(97 + (i * i + j * (i + 3)) % 26 for j in range(size)))
    return str(root)


def different(config: VerifyConfig, due: str = "bitwise") -> list[str]:
    """Unequal findings, if the verdict is another one than is due."""
    validate(config)
    found = verify(replace(config, steps=make_job(config.task, config.dtypes).steps)).verdict
    assert {f.kind for f in found.tree} >= {"loss", "gradient", "norm", "parameter"}
    unequal = [f"{f.kind} {f.name}" for f in (*found.tree, *found.plain) if not f.equal]
    return [] if found.word == due else [found.word, *unequal, *found.ledger]


LAYOUTS = [
    (GPT, {"mesh": "shard=3", "strategy": "zero3", "microbatches": 1}),
    (GPT, {"mesh": "replica=2 shard=2", "strategy": "hsdp", "microbatches": 2}),
    (LLAMA, {"mesh": "pipe=2 shard=2", "strategy": "zero1", "microbatches": 2}),
    (GPT, {"mesh": "tensor=2 pipe=2", "strategy": "zero1", "sequence_parallel": True, "dtype": "fp64"}),
    (LLAMA, {"mesh": "tensor=2", "strategy": "zero1", "sequence_parallel": True, "dtype": "fp64"}),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    LAYOUTS,
    ids=lambda value: str(value.get("mesh") if isinstance(value, dict) else value.task.network.model),
)
def test_a_packed_run_is_that_of_one_process(folder: str, model: VerifyConfig, layout: dict[str, Any]) -> None:
    if model is LLAMA:
        pytest.importorskip("transformers")
    assert not different(replace(model, data=folder, **layout), "equal" if "tensor" in layout["mesh"] else "bitwise")


@pytest.mark.parametrize(
    "model, mesh, row, microbatches",
    [
        (replace(GPT, pack=False), "shard=3", "zero3", 2),
        (GPT, "shard=2 pipe=2", "zero1", 6),
        (LLAMA, "shard=2", "zero3", 3),
    ],
)
def test_epochs_that_end_with_too_few_samples(
    folder: str, model: VerifyConfig, mesh: str, row: str, microbatches: int
) -> None:
    """Two epochs of three steps; the last of each has fewer samples than parts, and the last part none."""
    if model.task.network.model == "llama":
        pytest.importorskip("transformers")
    config = replace(model, data=folder, mesh=mesh, strategy=row, microbatches=microbatches, epochs=2)
    samples = make_job(replace(config.task, batch=1)).steps // 2
    config = replace(config, batch=(samples - 2) // 2)
    job, ranks = make_job(config.task, config.dtypes), config.machine.parsed_mesh.data_size
    assert job.steps == 6
    assert [job.batches.size(step, job.global_batch) for step in (2, 5)] == [samples % config.task.samples.batch] * 2
    assert job.count_fn(job.microbatches(5, ranks - 1, ranks, microbatches)[-1]) == 0
    assert not different(config)
