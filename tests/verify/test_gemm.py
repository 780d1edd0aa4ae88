"""A layout that multiplies with oneDNN is, to the bit, the single process that does, and not the one that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pipe_cases import CHAIN
from verify_cases import GPT, job_of, record

from plait.forward import products
from plait.referee.verify.run import judge, references
from plait.run.config import validate
from plait.tensor import gemm
from plait.tensor.gemm import has_onednn

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch was built without oneDNN")

DROPPING = replace(GPT, layers=3, steps=2, dropout=0.2, gemm="onednn")
HEADS = replace(GPT, heads=6, kv_heads=6, dtype="fp32", length=9, steps=2, gemm="onednn")
WIDE = replace(CHAIN, width=389, layers=5, gemm="onednn")
"""Sums of 389 terms, which oneDNN and torch's BLAS add in different orders; of few terms they give the same bits."""


def test_products_of_tensor_ranks_are_onednns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as plain layers have: none of a column's or row's three products goes to torch."""
    made: list[tuple[int, ...]] = []
    original = gemm._onednn

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made.append(tuple(weight.shape))
        return original(x, weight, bias)

    monkeypatch.setattr(gemm, "_onednn", counted)
    counts = []
    for mesh in ("tensor=1", "tensor=2", "tensor=3"):
        record(replace(HEADS, mesh=mesh, strategy="ddp", steps=1))
        counts.append(len(made))
        made.clear()
    assert counts[0] > 0 and counts == [counts[0], 2 * counts[0], 3 * counts[0]]


@pytest.mark.parametrize(("ours", "theirs"), [("onednn", "torch"), ("torch", "onednn")])
def test_the_setting_reaches_both(ours: str, theirs: str) -> None:
    """A layout that multiplies with the one beside a reference that does with the other: not the same bits."""
    config = replace(WIDE, mesh="shard=2", gemm=ours)  # type: ignore[arg-type]
    job, ranks = job_of(config), record(config)
    words = []
    for name in (ours, theirs):
        made = replace(job, gemm=name)
        verdict = judge(made, config, ranks, *references(made, config, ranks))
        words.append((verdict.word, {f.kind for f in verdict.tree if not f.bitwise}))
    assert words[0] == ("bitwise", set())
    assert words[1][0] == "different" and words[1][1] >= {"gradient", "parameter"}


def test_a_fault_that_layout_and_replay_share_shows_beside_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run the same ``Linear``: the plain full-batch step, whose products are torch's, does not."""
    original = products._weight_gradient
    monkeypatch.setattr(products, "_weight_gradient", lambda *given: original(*given) * 1.001)
    config = replace(WIDE, mesh="shard=2")
    job, ranks = job_of(config), record(config)
    verdict = judge(job, config, ranks, *references(job, config, ranks))
    assert [str(f) for f in verdict.tree if not f.bitwise] == []
    assert verdict.word == "different" and "gradient" in {f.kind for f in verdict.plain if not f.equal}


def test_a_torch_without_onednn_is_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    validate(DROPPING)
    monkeypatch.setattr(gemm, "has_onednn", lambda: False)
    with pytest.raises(ValueError, match="built without oneDNN: leave it out"):
        validate(DROPPING)
