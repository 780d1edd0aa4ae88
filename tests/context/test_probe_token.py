"""One token is changed: a right model moves its own document's later steps alone, and leaks are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.referee.verify.probe_token import ProbedToken, probe_tokens
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import make_job
from plait.run.models import gpt
from plait.tensor.time_axis import TimeAxis


def probed(mesh: str, **flags: Any) -> list[ProbedToken]:
    config = VerifyConfig().with_flags(mesh=mesh, layers=2, width=24, heads=2, length=16, **flags)
    job = make_job(config.task, config.dtypes)
    num = config.layout.microbatches
    return plait.run_threads(mesh, lambda c: probe_tokens(job, c, config.parallelism, num), sanitize=False)[0]


@pytest.mark.parametrize("mesh", ["shard=2", "shard=2 context=2", "pipe=2 shard=2 context=2", "tensor=2"])
def test_a_causal_model_moves_its_own_and_later_steps(mesh: str) -> None:
    for one in probed(mesh, microbatches=2):
        assert [at[2] for at in one.moved] == list(range(one.token[2], 16))
        assert not one.leaks and "and nothing else" in str(one)


@pytest.mark.parametrize("capacity", [None, 0.8])
def test_a_router_that_moves_roundings_does_not_leak(capacity: float | None) -> None:
    sizes: dict[str, Any] = {"model": "moe", "experts": 4, "capacity": capacity, "batch": 8, "dtype": "fp64"}
    assert all(one.right for one in probed("shard=2 context=2 expert=2", **sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 3 to 11 bytes, several in a row of 16."""
    root: Path = tmp_path_factory.mktemp("documents")
    for i in range(60):
        (root / f"{i:02}.txt").write_bytes(bytes(97 + (i * i + j * (i + 3)) % 26 for j in range(3 + i % 9)))
    return str(root)


def test_documents_stay_apart(folder: str) -> None:
    ends = [one.moved[-1][2] for one in probed("shard=2 context=2", pack=True, data=folder) if not one.leaks]
    assert len(ends) == 3 and ends[0] < 15


def everything(*_: Any, length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool)


def all_samples(documents: Tensor) -> Tensor:
    return torch.ones(*documents.shape, documents.shape[1], dtype=torch.bool)[:, None].tril()


FAULTS: dict[str, tuple[str, Callable[..., Any], dict[str, Any], str]] = {
    "documents see each other": ("attention_mask", all_samples, {"pack": True}, "another document"),
    "the future is seen": ("attention_mask", partial(everything, length=16), {"pack": True}, "an earlier step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_leak_is_named(monkeypatch: pytest.MonkeyPatch, folder: str, fault: str) -> None:
    name, wrong, flags, why = FAULTS[fault]
    monkeypatch.setattr(gpt, name, wrong)
    assert any(why in str(one) and "LEAKS" in str(one) for one in probed("shard=2", data=folder, **flags))


def test_blocks_in_a_wrong_order_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeAxis, "ordered", lambda self, by_rank, dim: by_rank)
    assert any("an earlier step" in str(one) for one in probed("shard=2 context=2"))
