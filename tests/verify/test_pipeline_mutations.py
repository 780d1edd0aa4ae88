"""The pipeline broken on purpose: each fault makes the verification say "different" and where, or is refused by name.

A fault is in place while the layout runs and gone when the reference does.  Which comparison sees it is part of the
claim: ``tree`` is the replay of the layout's own additions, ``plain`` the full-batch step, ``ledger`` the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pipeline_faults as faults
import pytest
import torch
import verify_cases as cases
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from verify_cases import GPT, TINY, judged, record

from plait.referee.verify.run import judge, references
from plait.run.config import VerifyConfig
from plait.run.models import mlp

Patch = pytest.MonkeyPatch
CHAIN = replace(TINY, layers=9, steps=3, batch=12)
"""12 samples: microbatches of one shape, so that one may stand for another."""
DECODER = replace(GPT, layers=3, steps=2, batch=12)

Layout = dict[str, Any]
PLAIN: Layout = {"mesh": "pipe=2", "schedule": "1f1b", "strategy": "ddp", "microbatches": 3}
DDP: Layout = PLAIN | {"mesh": "pipe=2 shard=2"}
V: Layout = {"mesh": "pipe=2 shard=2", "schedule": "zbv", "strategy": "zero3", "microbatches": 3}
ZERO2: Layout = V | {"schedule": "zb_h1", "strategy": "zero2"}
GPIPE: Layout = {"mesh": "pipe=3", "schedule": "gpipe", "strategy": "ddp", "microbatches": 4}
ROUNDS: Layout = {"mesh": "pipe=2 shard=2", "schedule": "interleaved", "strategy": "zero3", "microbatches": 4}
HPZ: Layout = ROUNDS | {"mesh": "pipe=2 replica=2 shard=2", "strategy": "hpz", "microbatches": 3}
HPZ_V: Layout = HPZ | {"schedule": "zbv"}
SUMS = {"tree: gradient", "tree: norm", "plain: gradient"}
VALUES = {"tree: loss", "tree: gradient", "plain: loss"}

FAULTS: list[tuple[Callable[[Patch], None], VerifyConfig, Layout, set[str] | str]] = [
    # fault, job, layout, comparisons that must see it, or the words of the error
    (faults.tied_uses_summed_before_the_data_axes, DECODER, DDP, {"tree: gradient"}),
    (faults.tied_uses_summed_before_the_data_axes, DECODER, DDP | {"schedule": "zbv"}, {"tree: gradient"}),
    (faults.tied_uses_not_summed, DECODER, PLAIN, {*SUMS, "ledger"}),
    (faults.tied_uses_not_summed, DECODER, V, {*SUMS}),
    (faults.tied_uses_summed_twice, DECODER, PLAIN, {*SUMS, "ledger"}),
    (faults.tied_uses_summed_twice, DECODER, V, {*SUMS}),
    (faults.tied_uses_summed_on_the_first_stage_alone, DECODER, PLAIN, {"tree: gradient", "plain: gradient"}),
    (faults.tied_uses_summed_on_the_first_stage_alone, DECODER, ROUNDS, {"tree: gradient", "plain: gradient"}),
    # which runs the ranks sum for the norm is taken from the layout, so only the plain step can see these:
    (faults.tied_weight_counted_on_every_stage, DECODER, PLAIN, {"plain: norm"}),
    (faults.tied_weight_counted_on_every_stage, DECODER, V, {"plain: norm"}),
    (faults.weigh_twice, CHAIN, ZERO2, "has no forward behind it"),
    (faults.weigh_twice, CHAIN, V, "has no forward behind it"),
    (faults.double_what_is_weighed, CHAIN, ZERO2, SUMS),
    (faults.double_what_is_weighed, DECODER, V, SUMS),
    (faults.drop_the_last_weight_part, CHAIN, ZERO2, SUMS),
    (faults.drop_the_last_weight_part, DECODER, V, SUMS),
    (faults.no_gradient_for_the_stage_before, CHAIN, PLAIN, SUMS),
    (faults.no_gradient_for_the_stage_before, DECODER, V, SUMS),
    (faults.hand_over_the_gradient_of_another_microbatch, CHAIN, GPIPE, SUMS),
    (faults.hand_over_the_gradient_of_another_microbatch, DECODER, V, SUMS),
    (faults.hand_over_the_activation_of_another_microbatch, CHAIN, GPIPE, VALUES),
    (faults.hand_over_the_activation_of_another_microbatch, DECODER, ROUNDS, VALUES),
    (faults.use_the_first_activation_for_all, CHAIN, PLAIN, VALUES),
    (faults.use_the_first_activation_for_all, DECODER, V, VALUES),
    (faults.cross_two_messages, CHAIN, GPIPE, SUMS),
    (faults.cross_two_messages, DECODER, PLAIN | {"schedule": "gpipe"}, SUMS),
    (faults.forget_a_message, CHAIN, PLAIN, "waited 2 s in recv .* did not send"),
    (faults.a_stray_message, CHAIN, PLAIN, {"ledger"}),
    (faults.a_stray_message, DECODER, V, {"ledger"}),
    (faults.seed_twice_as_much, CHAIN, PLAIN, SUMS),
    (faults.seed_twice_as_much, DECODER, V, SUMS),
    (faults.leave_out_the_reduction_of_a_stage, CHAIN, DDP, {*SUMS, "ledger"}),
    (
        faults.leave_out_the_reduction_of_a_stage,
        DECODER,
        DDP | {"schedule": "zbv", "strategy": "zero1"},
        {*SUMS, "ledger"},
    ),
    (faults.add_ranks_in_reverse, CHAIN, V | {"mesh": "pipe=2 shard=3"}, {"tree: gradient"}),
    (faults.add_ranks_in_reverse, CHAIN, DDP | {"mesh": "pipe=2 shard=3"}, {"tree: gradient"}),
    (faults.add_microbatches_in_reverse, CHAIN, V, {"tree: gradient"}),
    (faults.add_microbatches_in_reverse, DECODER, ROUNDS, {"tree: gradient"}),
    (faults.keep_only_the_last_microbatch, CHAIN, V, SUMS),
    (faults.keep_only_the_last_microbatch, DECODER, ZERO2, SUMS),
    (faults.report_the_losses_of_a_rank_that_has_none, CHAIN, PLAIN, {"tree: loss", "plain: loss"}),
    (faults.report_the_losses_of_a_rank_that_has_none, DECODER, V, {"tree: loss", "plain: loss"}),
    (faults.report_losses_in_the_order_of_backwards, CHAIN, PLAIN, {"tree: loss"}),
    (faults.report_losses_in_the_order_of_backwards, DECODER, V, {"tree: loss"}),
    (faults.keep_parameters_over_the_update, CHAIN, V, {"tree: loss", "tree: gradient", "ledger"}),
    (faults.keep_parameters_over_the_update, DECODER, ROUNDS, {"tree: loss", "tree: gradient", "ledger"}),
    (faults.gather_from_what_lies_at_rest, CHAIN, HPZ, {"ledger"}),
    (faults.gather_from_what_lies_at_rest, DECODER, HPZ_V, {"ledger"}),
    (faults.go_on_from_kept_parameters, CHAIN, HPZ, {"tree: loss", "tree: gradient", "ledger"}),
    (faults.go_on_from_kept_parameters, DECODER, HPZ_V, {"tree: loss", "tree: gradient", "ledger"}),
    (faults.count_layers_from_0_in_every_stage, CHAIN, PLAIN, VALUES),
    (faults.count_layers_from_0_in_every_stage, DECODER, V, VALUES),
    (faults.draw_for_the_next_microbatch, CHAIN, PLAIN, VALUES),
    (faults.draw_for_the_next_microbatch, DECODER, V, VALUES),
]


@pytest.mark.parametrize(
    ("fault", "job", "layout", "seen"),
    FAULTS,
    ids=[f"{fault.__name__}-{layout['schedule']}-{layout['strategy']}" for fault, _, layout, _ in FAULTS],
)
def test_fault_is_caught(
    fault: Callable[[Patch], None], job: VerifyConfig, layout: Layout, seen: set[str] | str
) -> None:
    config = replace(job, **layout)
    cases.job_of(config)
    with pytest.MonkeyPatch.context() as broken:
        fault(broken)
        if isinstance(seen, str):
            with pytest.raises((ValueError, TimeoutError), match=seen):
                record(config)
            return
        ranks = record(config)
    result = judged(config, ranks)
    assert result.verdict.word == "different"
    assert seen <= result.different(), f"seen only by {sorted(result.different())}"
    if seen == {"ledger"}:
        assert result.different() == {"ledger"}, "the numbers were right"
    if seen == {"tree: gradient"}:
        assert not any(kind.startswith("plain") for kind in result.different()), "a few last bits are within rounding"


@pytest.mark.parametrize(
    ("job", "layout"),
    list({repr((job, layout)): (job, layout) for _, job, layout, _ in FAULTS}.values()),
    ids=lambda value: value["schedule"] if isinstance(value, dict) else value.model,
)
def test_without_a_fault_the_same_layouts_are_bitwise(job: VerifyConfig, layout: Layout) -> None:
    config = replace(job, **layout)
    result = judged(config, record(config))
    assert result.verdict.word == "bitwise", result.different()


# ---- activations that are recomputed ------------------------------------------------------------------------------


class Recomputed(mlp.Layer):
    """A layer whose inside is thrown away in forward and made again in backward."""

    def forward(self, x_BD: Tensor) -> Tensor:
        out_BD: Tensor = checkpoint(super().forward, x_BD, use_reentrant=False)
        return out_BD


def recomputed(patch: Callable[[Patch], None] | None, layout: Layout) -> set[str]:
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
        ranks = record(config, job)
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
def test_recomputed_activations_are_bitwise(layout: Layout) -> None:
    assert not recomputed(None, layout)


@pytest.mark.parametrize("fault", [faults.recompute_with_the_latest_draw, faults.recompute_for_another_microbatch])
@pytest.mark.parametrize("layout", [PLAIN, V, ZERO2, GPIPE, ROUNDS], ids=lambda layout: layout["schedule"])
def test_masks_of_another_microbatch_in_recomputation_are_caught(
    fault: Callable[[Patch], None], layout: Layout
) -> None:
    found = recomputed(fault, layout)
    assert {"tree: gradient", "plain: gradient"} <= found, found
    assert "plain: loss" not in found, "the forwards were right"
