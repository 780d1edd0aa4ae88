"""Faults of a recomputation are seen, and layers that recompute themselves are bitwise.

That recomputation itself changes no bit is held by test_layouts.py and the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pipeline_faults as faults
import pytest
import torch
import verify_cases as cases
from fault_table import CHAIN, PLAIN, ROUNDS, V
from pipe_cases import HEADS
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from verify_cases import GPT, verify

from plait.forward.context import ForwardContext
from plait.predict import tensor
from plait.referee.verify import record
from plait.referee.verify.run import judge, references
from plait.run.models import mlp
from plait.zero.unit import State, Unit
from plait.zero.unshard import Unsharding

MODES = ("full", "selective")
TWO_STEPS = replace(GPT, steps=2)


@pytest.mark.parametrize("recompute", MODES)
def test_masks_that_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """The recomputation stands one sample further than the forward."""
    again = ForwardContext.again

    def elsewhere(self: ForwardContext, *, whole: bool) -> ForwardContext:
        assert self.position is not None
        moved = replace(self.position, first_sample=self.position.first_sample + 1)
        return again(self, whole=whole)._replace(position=moved)

    monkeypatch.setattr(ForwardContext, "again", elsewhere)
    found = verify(replace(TWO_STEPS, recompute=recompute, mesh="shard=2"))  # type: ignore[arg-type]
    assert "tree: gradient" in found.different()


def test_a_unit_that_is_gathered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the recomputation and again for the backward behind it: right values, and messages too many."""
    begins = Unsharding._begin_backward_of

    def again(self: Unsharding, unit: Unit) -> None:
        known = unit in self._backward_open
        begins(self, unit)
        if known and unit.state is State.UNSHARDED:
            unit.reshard()
            unit.unshard("backward", self.current.context.microbatch)
            unit.wait()

    monkeypatch.setattr(Unsharding, "_begin_backward_of", again)
    assert verify(replace(TWO_STEPS, recompute="full", mesh="shard=2")).different() == {"ledger"}


def test_messages_of_a_recomputation_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    once = tensor.predict_tensor
    monkeypatch.setattr(record, "predict_tensor", lambda *args, twice, **sizes: once(*args, **sizes))
    assert verify(replace(HEADS, recompute="full", mesh="tensor=2")).different() == {"ledger"}


# ---- layers that recompute themselves -------------------------------------------------------------------------------


class Recomputed(mlp.Layer):
    """A layer whose inside is thrown away in forward and made again in backward."""

    def forward(self, x_BD: Tensor) -> Tensor:
        out_BD: Tensor = checkpoint(super().forward, x_BD, use_reentrant=False)
        return out_BD


def recomputed(patch: Callable[[pytest.MonkeyPatch], None] | None, layout: dict[str, Any]) -> set[str]:
    """What differs when every layer is recomputed, the fault in place; an empty set is bitwise."""
    config = replace(CHAIN, dropout=0.3, **layout)
    plainly = cases.job_of(config)

    def build() -> torch.nn.Module:
        model = plainly.build()
        for layer in model:
            layer.__class__ = Recomputed  # type: ignore[assignment]
        return model

    job = replace(plainly, build=build)
    with pytest.MonkeyPatch.context() as broken:
        if patch is not None:
            patch(broken)
        ranks = cases.record(config, job)
    tree, plain = references(job, config, ranks)
    verdict = judge(job, config, ranks, tree, plain)
    found = cases.Verified(ranks, tree, verdict).different()
    assert (verdict.word == "bitwise") == (not found)
    return found


@pytest.mark.parametrize("fault", [faults.recompute_with_the_latest_draw, faults.recompute_for_another_microbatch])
@pytest.mark.parametrize("layout", [PLAIN, V, ROUNDS], ids=lambda layout: layout["schedule"])
def test_masks_of_another_microbatch_in_recomputation_are_caught(
    fault: Callable[[pytest.MonkeyPatch], None], layout: dict[str, Any]
) -> None:
    found = recomputed(fault, layout)
    assert "tree: gradient" in found and all(kind.startswith("tree: ") for kind in found), found
