"""Recomputation changes no bit: held against the single process, which never recomputes, and against the same layout.

Dropout on, clipping at work, ragged token counts, samples that nothing divides, tied embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pipeline_faults as faults
import pytest
import torch
import verify_cases as cases
from fault_table import CHAIN, GPIPE, HPZ, HPZ_V, PLAIN, ROUNDS, ZERO2, V
from pipe_cases import DECODER, is_bitwise, runs, same
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from verify_cases import GPT, MLP, verify

from plait.forward.context import ForwardContext
from plait.predict import tensor
from plait.referee.verify import record
from plait.referee.verify.run import judge, references
from plait.run.config import VerifyConfig, validate
from plait.run.models import mlp
from plait.schedule.orders import ORDERS
from plait.table.cells import TABLE
from plait.zero.unit import State, Unit
from plait.zero.unshard import Unsharding

MODES = ("full", "selective")
TWO_STEPS = replace(GPT, steps=2)
LLAMA = replace(TWO_STEPS, model="llama", dropout=0.2)
QWEN2 = replace(LLAMA, model="qwen2")
HEADS = replace(TWO_STEPS, heads=6, kv_heads=6, dtype="fp64", length=9)


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize(
    ("mesh", "microbatches", "recompute"),
    [("shard=2", 3, "full"), ("shard=2", 1, "selective"), ("replica=2 shard=2", 1, "full")],
)
def test_every_row(mesh: str, microbatches: int, recompute: str, row: str) -> None:
    layout = {"strategy": row, "microbatches": microbatches}
    result = runs(TWO_STEPS, mesh, recompute=recompute, **layout)
    is_bitwise(result)
    assert same(result, runs(TWO_STEPS, mesh, **layout))


SCHEDULES = [
    *((order, "full", ("pipe=2", "pipe=3", "pipe=2 shard=2")[i % 3]) for i, order in enumerate(ORDERS)),
    *((order, "selective", "pipe=2") for order in ("1f1b", "zb_h1", "dualpipe_v")),
]


@pytest.mark.parametrize(("order", "recompute", "mesh"), SCHEDULES)
def test_every_order(order: str, recompute: str, mesh: str) -> None:
    """Backwards in two parts: recomputed once, in the first; messages between stages and gathers as without."""
    is_bitwise(runs(DECODER, mesh, schedule=order, microbatches=4, recompute=recompute))


@pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("hold", [1, None])
def test_stages_held_and_not(hold: int | None, order: str) -> None:
    is_bitwise(runs(DECODER, "pipe=2 shard=2", schedule=order, microbatches=3, recompute="full", hold=hold))


@pytest.mark.parametrize("row", ["ddp", "zero3", "hpz"])
def test_an_mlp(row: str) -> None:
    is_bitwise(runs(replace(MLP, steps=2, dropout=0.3), "shard=3", strategy=row, recompute="full", microbatches=2))


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize(("mesh", "order"), [("shard=2", None), ("pipe=2 shard=2", "1f1b"), ("pipe=2", "zb_h1")])
def test_hugging_face(mesh: str, order: str | None, config: VerifyConfig, recompute: str) -> None:
    is_bitwise(runs(config, mesh, schedule=order, microbatches=2, recompute=recompute))


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize(
    ("mesh", "order", "sequence"),
    [
        *product(("tensor=2", "tensor=3", "shard=2 tensor=2"), (None,), (False, True)),
        *product(("pipe=2 tensor=2",), ("1f1b", "zb_h1", "dualpipe_v"), (False, True)),
    ],
)
def test_tensor_parallelism(mesh: str, order: str | None, sequence: bool, recompute: str) -> None:
    """The same bits as without; messages inside a block twice, as predicted, byte for byte."""
    layout = {"schedule": order, "sequence_parallel": sequence, "microbatches": 3}
    result, without = (runs(HEADS, mesh, recompute=mode, **layout) for mode in (recompute, None))
    assert result.verdict.word == "equal", result.different()
    assert same(result, without)


@pytest.mark.parametrize("sequence", [False, True])
def test_hugging_face_over_tensor_ranks(sequence: bool) -> None:
    """Attention that shapes its heads by its input: the stream is gathered before it."""
    config = replace(HEADS, model="qwen2")
    assert runs(config, "shard=2 tensor=2", recompute="full", sequence_parallel=sequence).verdict.word == "equal"


def test_an_mlp_over_tensor_ranks() -> None:
    """Blocks that begin or end at a product that is cut: what one leaves is cut when the next runs again."""
    config = replace(MLP, layers=7, steps=2, dtype="fp64", dropout=0.2)
    for row in ("ddp", "zero2"):
        result = runs(config, "tensor=2", strategy=row, recompute="full", microbatches=2)
        assert result.verdict.word == "equal", result.different()


def test_an_mlp_has_no_attention() -> None:
    with pytest.raises(ValueError, match="selective is for attention, which mlp lacks"):
        validate(replace(MLP, recompute="selective"))


# ---- faults are seen ----------------------------------------------------------------------------------------------


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
            unit.unshard("backward", self.microbatch)
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


@pytest.mark.parametrize(
    "layout",
    [PLAIN, V, ZERO2, GPIPE, ROUNDS, V | {"hold": None}, HPZ | {"hold": 0}, HPZ_V | {"hold": None}],
    ids=lambda layout: f"{layout['schedule']}-{layout['strategy']}-hold={layout.get('hold', 1)}",
)
def test_recomputed_activations_are_bitwise(layout: dict[str, Any]) -> None:
    assert not recomputed(None, layout)


@pytest.mark.parametrize("fault", [faults.recompute_with_the_latest_draw, faults.recompute_for_another_microbatch])
@pytest.mark.parametrize("layout", [PLAIN, V, ZERO2, GPIPE, ROUNDS], ids=lambda layout: layout["schedule"])
def test_masks_of_another_microbatch_in_recomputation_are_caught(
    fault: Callable[[pytest.MonkeyPatch], None], layout: dict[str, Any]
) -> None:
    found = recomputed(fault, layout)
    assert {"tree: gradient", "plain: gradient"} <= found, found
    assert "plain: loss" not in found, "the forwards were right"
