"""Mixed precision is the same run in one process: master weights, wide sums, loss scaling, offloaded state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipe_cases import is_bitwise, runs
from torch import nn
from verify_cases import GPT, MLP, record

from plait.referee.verify.run import judge, references
from plait.run.config import VerifyConfig, validate
from plait.run.job.job import make_job
from plait.table.cells import TABLE

DECODER = replace(GPT, layers=3, steps=2, dropout=0.2)
CHAIN = replace(MLP, layers=7, width=7, steps=2)

LAYOUTS = [
    ("replica=2 shard=2", None),
    ("shard=3", None),
    ("pipe=2 shard=2", "zb_h1"),
    ("pipe=2 shard=2", "zbv"),
    ("pipe=3", "interleaved"),
    ("pipe=2 replica=2", "1f1b"),
]
CASES = [
    (row, *LAYOUTS[(i + j) % len(LAYOUTS)], dtype, bool((i + j // 2) % 2), ("element", "tensor")[(i // 2 + j) % 2])
    for i, row in enumerate(TABLE)
    for j, dtype in enumerate(("bf16-mixed", "bf16-mixed", "fp16-mixed"))
]


@pytest.mark.parametrize(("row", "mesh", "order", "dtype", "offload", "cut"), CASES)
def test_a_mixed_layout_is_the_mixed_process(
    row: str, mesh: str, order: str | None, dtype: str, offload: bool, cut: str
) -> None:
    config = DECODER if len(row) % 2 else CHAIN
    is_bitwise(
        runs(config, mesh, strategy=row, schedule=order, microbatches=3, dtype=dtype, offload=offload, cut=cut), None
    )


def test_links_are_measured_in_the_dtype_of_the_computation() -> None:
    config = replace(CHAIN, dtype="bf16-mixed", split="measured")
    is_bitwise(runs(config, "pipe=2", schedule="1f1b", microbatches=2), None)


def test_offloading_changes_no_bit_in_fp32() -> None:
    is_bitwise(runs(DECODER, "shard=3", strategy="zero2", microbatches=2, offload=True), None)


@pytest.mark.parametrize("sequence", [False, True])
def test_with_a_tensor_axis_it_is_equal(sequence: bool) -> None:
    config = replace(DECODER, width=24, heads=6, kv_heads=6)
    result = runs(config, "shard=2 tensor=2", strategy="zero3", dtype="bf16-mixed", sequence_parallel=sequence)
    assert result.verdict.word == "equal", result.different()


def test_a_loss_scale_that_is_too_large_is_left_out_in_both() -> None:
    """The layout and the process leave out the same steps; if no step was made nothing is proved."""
    config = replace(DECODER, strategy="zero3", dtype="fp16-mixed", clip=None)
    result = runs(config, "replica=2 shard=2", loss_scale=2.0**26, steps=12)
    assert result.verdict.word == "bitwise", result.different()
    assert 0 < result.verdict.left_out < 12 and result.ranks[0].made[-1]
    nothing = runs(config, "replica=2 shard=2", loss_scale=2.0**40)
    assert nothing.verdict.none_made and nothing.verdict.word == "different"


def test_a_row_written_by_hand_says_its_own_dtypes() -> None:
    row = "mine: shard bf16 | full bf16 | shard fp32, pending(replica) | shard/replica fp64"
    is_bitwise(runs(DECODER, "replica=2 shard=2", strategy=row, microbatches=2), None)


def test_bf16_with_fp32_masters_follows_fp32() -> None:
    """30 steps of a decoder: losses within 1 % of fp32's, which is what bf16's 8 bits of mantissa leave."""
    config = replace(DECODER, steps=30, dropout=0.0, clip=1.0, lr=1e-3)
    exact, mixed = (
        runs(config, "shard=2", strategy="zero3", dtype=dtype).ranks[0].losses for dtype in ("fp32", "bf16-mixed")
    )
    assert exact[-1] < 0.9 * exact[0], "it learns"
    assert max(abs(m / e - 1) for m, e in zip(mixed, exact, strict=True)) < 0.01


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (VerifyConfig(dtype="bf16", strategy="x: full bf16|full bf16|full, pending(shard, replica)|full"), "dtypes of"),
        (VerifyConfig(dtype="fp16-mixed", loss_scale=0.0), "loss_scale is 0.0: give a number above 0"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(config: VerifyConfig, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        validate(config)


@pytest.mark.parametrize(
    ("mesh", "dtype"), [("pipe=2", "fp32"), ("shard=2", "bf16-mixed"), ("pipe=2 shard=2", "bf16-mixed")]
)
def test_a_frozen_weight_of_two_stages_and_of_few_bits(mesh: str, dtype: str) -> None:
    """It is rounded like all others, it has no master weights, and no use of it gets a gradient."""
    config = replace(DECODER, mesh=mesh, dtype=dtype, strategy="ddp", microbatches=2)
    whole = make_job(config)

    def build() -> nn.Module:
        model = whole.build()
        model.get_submodule("embed").weight.requires_grad_(False)
        return model

    job = replace(whole, build=build)
    ranks = record(config, job)
    verdict = judge(job, config, ranks, *references(job, config, ranks))
    assert verdict.bitwise, [f.name for f in verdict.tree if not f.bitwise]
