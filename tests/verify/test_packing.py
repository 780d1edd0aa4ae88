"""Packed documents, and epochs whose last batch is too small for its parts: still the single process's run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.comm import run
from plait.referee.verify.record import record_run
from plait.referee.verify.run import Verdict, judge, references
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


def verdict_of(config: VerifyConfig) -> Verdict:
    validate(config)
    job = make_job(config.task, config.dtypes)
    config = replace(config, steps=job.steps)
    ranks = run(config.machine.parsed_mesh, lambda comm: record_run(job, config, comm), deadline=20)
    verdict = judge(job, config, ranks, *references(job, config, ranks))
    assert {f.kind for f in verdict.tree} >= {"loss", "gradient", "norm", "parameter"}
    return verdict


def failed(verdict: Verdict) -> list[str]:
    return [f"{f.kind} {f.name}" for f in (*verdict.tree, *verdict.plain) if not f.equal] + list(verdict.ledger)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    "mesh, row, microbatches",
    [("shard=3", "zero3", 1), ("replica=2 shard=2", "hsdp", 2), ("pipe=2", "ddp", 3), ("shard=2 pipe=2", "zero1", 2)],
)
def test_a_packed_run_is_bitwise(folder: str, model: VerifyConfig, mesh: str, row: str, microbatches: int) -> None:
    if model is LLAMA:
        pytest.importorskip("transformers")
    verdict = verdict_of(replace(model, data=folder, mesh=mesh, strategy=row, microbatches=microbatches))
    assert verdict.word == "bitwise", failed(verdict)


@pytest.mark.parametrize(
    "model, mesh, sequence",
    [
        (GPT, "tensor=2", False),
        (GPT, "tensor=2", True),
        (GPT, "tensor=2 pipe=2", True),
        (LLAMA, "tensor=2", True),
        (LLAMA, "tensor=2 pipe=2", False),
    ],
)
def test_a_packed_run_is_equal_under_a_tensor_axis(folder: str, model: VerifyConfig, mesh: str, sequence: bool) -> None:
    if model is LLAMA:
        pytest.importorskip("transformers")
    config = replace(model, data=folder, mesh=mesh, strategy="zero1", microbatches=2, dtype="fp64")
    verdict = verdict_of(replace(config, sequence_parallel=sequence))
    assert verdict.word == "equal", failed(verdict)


@pytest.mark.parametrize(
    "model, mesh, row, microbatches",
    [
        (replace(GPT, pack=False), "shard=3", "zero3", 2),
        (GPT, "replica=2 shard=2", "hsdp", 3),
        (GPT, "shard=2 pipe=2", "zero1", 6),
        (LLAMA, "shard=2", "zero3", 3),
        (replace(LLAMA, pack=False), "pipe=2", "ddp", 5),
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
    verdict = verdict_of(config)
    assert verdict.word == "bitwise", failed(verdict)
