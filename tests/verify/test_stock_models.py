"""Models that were not written for plait: every layout of them equals one process to the bit."""

from dataclasses import replace
from typing import Any

import pytest
from stock_nets import JOBS, NETS
from verify_cases import Verified, verify

from plait.run.config.settings import VerifyConfig, with_job
from plait.run.job.own import UserJob
from plait.table.cells import TABLE

TWO = (("shard=3", "zero3"), ("pipe=2 shard=2", "ddp"))
HUGGING_FACE = ("gpt2", "llama", "qwen2")


def bitwise(name: str, mesh: str, row: str = "zero3", job: UserJob | None = None, **settings: Any) -> Verified:
    """Every loss, gradient, norm, parameter, buffer and optimizer state, and every message."""
    if name in (*HUGGING_FACE, "adapted", "autocast"):
        pytest.importorskip("transformers")
    how = {"microbatches": 2, "steps": 2, "clip": 0.3, "bucket": 0, "spread": 0} | settings
    result = verify(with_job(VerifyConfig(job=job or JOBS[name], mesh=mesh, strategy=row, **how)))
    assert result.verdict.bitwise and not result.verdict.ledger, result.verdict
    assert {f.kind for f in result.verdict.tree} >= {"loss", "gradient", "norm", "parameter", "optimizer"}
    return result


@pytest.mark.parametrize("mesh", ["shard=2", "replica=2 shard=2", "shard=3"])
@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("name", [*HUGGING_FACE, "resnet"])
def test_every_row_on_every_mesh(name: str, row: str, mesh: str) -> None:
    result = bitwise(name, mesh, row)
    assert max(norm for norm in result.ranks[0].norms if norm is not None) > 0.3, "clipping never came to work"


@pytest.mark.parametrize("mesh, row", [("shard=2", "ddp"), ("shard=3", "zero3"), ("replica=2 shard=2", "hpz")])
@pytest.mark.parametrize("name", NETS)
def test_modules_of_torch(name: str, row: str, mesh: str) -> None:
    bitwise(name, mesh, row, microbatches=3)


@pytest.mark.parametrize("name", ["resnet", "encoder", "lstm"])
def test_microbatches_without_samples(name: str) -> None:
    """Hugging Face's attention reshapes by -1 and takes none: there, samples without targets do."""
    batches = [
        {key: value[:samples] for key, value in JOBS[name].batch(step).items()} for step, samples in enumerate((9, 7))
    ]
    bitwise(name, "shard=3", job=replace(JOBS[name], batches=batches), microbatches=3)


@pytest.mark.parametrize(
    ("name", "mesh", "row", "settings"),
    [
        ("adapted", "shard=2", "ddp", {}),
        ("adapted", "shard=3", "zero3", {}),
        ("adapted", "pipe=2 shard=2", "zero3", {"schedule": "zb_h1"}),
        *((name, mesh, row, {"dtype": "bf16"}) for name in ("gpt2", "llama") for mesh, row in TWO),
        *(("autocast", mesh, row, {}) for mesh, row in TWO),
        # After the second embedding the stream is not yet the first dropout's input: GPT-2 adds the two in between.
        *(("gpt2", "pipe=2", "zero3", {"split": split}) for split in ("1 6", "2 5", "6 1")),
        *(("without relu", "pipe=2", "zero3", {"split": split}) for split in ("2 7", "3 6")),
    ],
)  # fmt: skip
def test_adapters_16_bits_and_cuts(name: str, mesh: str, row: str, settings: dict[str, Any]) -> None:
    result = bitwise(name, mesh, row, **settings)
    if name == "adapted":
        assert {piece[0].split(".")[-2] for record in result.ranks for piece in record.gradients[0]} == {"a", "b"}


@pytest.mark.parametrize(
    ("mesh", "row", "order"),
    [
        ("pipe=2 shard=2", "zero3", "1f1b"),
        ("pipe=2 shard=2", "ddp", "zb_h1"),
        ("pipe=2 replica=2", "psdp", "interleaved"),
        ("pipe=2 shard=2", "zero2", "zbv"),
        ("pipe=3", "zero3", "1f1b"),
        ("pipe=3 shard=2", "hsdp", "zb_h1"),
    ],
)
@pytest.mark.parametrize("name", [*HUGGING_FACE, "resnet", "sequential"])
def test_pipelines(name: str, mesh: str, row: str, order: str) -> None:
    microbatches = 2 if mesh == "pipe=3 shard=2" else 3
    result = bitwise(name, mesh, row, schedule=order, microbatches=microbatches)
    assert bool(result.ranks[0].ties) == (name in ("gpt2", "qwen2"))
