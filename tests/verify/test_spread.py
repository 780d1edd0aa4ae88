"""A layout against honest runs: 16 bits over a tensor axis are benign, faults are far outside, honest runs are not."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import tensor_faults as tensors
import verify_cases as cases
from verify_cases import TINY

from plait.referee.verify.observed import RankRecord, Record
from plait.referee.verify.run import judge, placed, references
from plait.referee.verify.spread import Spread, honest_runs, spread_of
from plait.run.config.settings import VerifyConfig

Patch = pytest.MonkeyPatch
GPT = replace(tensors.GPT, steps=3, strategy="zero1")
FOUR = replace(tensors.FOUR, steps=3, strategy="zero1", sequence_parallel=True)
DEEP = replace(tensors.DEEP, steps=3, strategy="zero1")


def beside(config: VerifyConfig, fault: Callable[[Patch], None] | None = None) -> Spread:
    job = cases.job_of(config)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        ranks = cases.record(config, job)
    return spread_of(ranks, honest_runs(job, config, ranks))


@pytest.mark.parametrize("dtype", ["bf16", "bf16-mixed", "fp16-mixed", "fp32", "fp64"])
@pytest.mark.parametrize("config", [GPT, FOUR, replace(DEEP, mesh="tensor=3")], ids=["gpt", "four", "mlp-3"])
def test_split_products_are_benign(config: VerifyConfig, dtype: str) -> None:
    found = beside(replace(config, dtype=dtype))
    assert found.benign, str(found)
    assert found.worst.times < 5, "far from the margin"


@pytest.mark.parametrize("dtype", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize(
    ("fault", "config"),
    [
        (tensors.every_rank_draws_the_mask_of_the_first, GPT),
        (tensors.skip_a_bias, DEEP),
        (tensors.multiply_with_another_input, GPT),
        (tensors.add_a_rows_weight_gradient_twice, GPT),
        (tensors.count_targets_on_every_tensor_rank, GPT),
    ],
)
def test_a_fault_lies_outside(fault: Callable[[Patch], None], config: VerifyConfig, dtype: str) -> None:
    """The distance depends on the text, Python's own library: 26 times under Python 3.11.7, 18 under 3.11.2."""
    found = beside(replace(config, dtype=dtype), fault)
    assert not found.benign, str(found)


def as_rank(run: Record) -> RankRecord:
    """A single process as a rank that has everything."""
    pieces = [{(n, 0, g.numel()): g.reshape(-1) for n, g in step.summed.items()} for step in run.steps]
    steps = [replace(step, summed=own) for step, own in zip(run.steps, pieces, strict=True)]
    return RankRecord(steps, run.parameters, rank=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_honest_run_is_called_a_bug(dtype: str) -> None:
    config = replace(TINY, mesh="shard=2 tensor=2", strategy="hsdp", microbatches=3, dtype=dtype, steps=3)
    job, nothing = cases.job_of(config), [RankRecord(rank=0)]
    honest = honest_runs(job, config, nothing, 108)
    eight = replace(honest, runs=honest.runs[:8])
    worst = max(spread_of([as_rank(run)], eight).worst.times for run in honest.runs[8:])
    assert worst < 8, worst


def test_a_loss_that_is_no_number_is_no_honest_run() -> None:
    config = replace(TINY, steps=3)
    job, nothing = cases.job_of(config), [RankRecord(rank=0)]
    honest = honest_runs(job, config, nothing, 2)
    rank = as_rank(honest.runs[0])
    assert spread_of([rank], honest).benign
    lost = replace(rank, steps=[rank.steps[0], replace(rank.steps[1], loss=math.nan), rank.steps[2]])
    assert not spread_of([lost], honest).benign


def test_sixteen_bits_over_a_tensor_axis_are_judged_by_the_spread() -> None:
    config = replace(GPT, dtype="bf16")
    job = cases.job_of(config)
    ranks = cases.record(config, job)
    verdict = judge(job, config, ranks, *references(job, config, ranks))
    assert verdict.word == "equal" and verdict.spread is not None and verdict.spread.runs == 8
    assert "benign" in str(verdict.spread)
    assert placed(verdict, job, config, ranks, references(job, config, ranks)) is verdict
    far = replace(verdict, spread=replace(verdict.spread, worst=replace(verdict.spread.worst, max_abs=1e9)))
    assert far.word == "different" and "a bug" in str(far)
    told = placed(far, job, config, ranks, references(job, config, ranks))
    assert told.first is None and "within its tolerance" in told.unplaced
