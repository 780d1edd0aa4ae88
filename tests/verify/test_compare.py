"""Two runs are equal to the bit against the replay, within rounding against the plain step, nothing left out."""

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from verify_cases import TINY, Verified, job_of, judged, verify

from plait.comm import run_threads
from plait.referee.verify import reference
from plait.referee.verify.compare import find
from plait.referee.verify.observed import RankRecord, as_tensor
from plait.referee.verify.run import placed, references
from plait.step.norm import Norm, norm_of
from plait.table.cells import TABLE
from plait.table.mesh import Mesh

CONFIG = replace(TINY, mesh="shard=2", strategy="zero3", microbatches=2)


@pytest.fixture(scope="module")
def honest() -> Verified:
    return verify(CONFIG)


def one_bit(tensor: torch.Tensor) -> None:
    """The next number up, in the largest element."""
    flat = tensor.view(-1)
    k = int(flat.abs().argmax())
    flat[k] = torch.nextafter(flat[k], flat[k] + 1)


def first(values: dict[Any, Any]) -> Any:
    return next(iter(values.values()))


CHANGES: dict[str, Callable[[RankRecord], Any]] = {
    "loss": lambda record: setattr(record.steps[3], "loss", record.steps[3].loss * (1 + 1e-15)),
    "gradient": lambda record: one_bit(first(record.gradients[4])),
    "parameter": lambda record: one_bit(record.parameters["1.linear.bias"]),
    "state": lambda record: one_bit(first(record.state)["exp_avg_sq"]),
    "norm": lambda record: setattr(record.steps[2], "norm", record.norms[2] * (1 + 1e-7)),  # type: ignore[operator]
    "NaN": lambda record: record.parameters["0.linear.weight"][0, 0].fill_(math.nan),
    "no gradient": lambda record: record.gradients[0].popitem(),
    "no parameter": lambda record: record.parameters.pop("1.linear.bias"),
    "no state": lambda record: record.state.popitem(),
    "no moment": lambda record: first(record.state).pop("exp_avg"),
    "no step": lambda record: record.steps.pop(),
    "no loss of a microbatch": lambda record: record.steps[0].losses.popitem(),
    "a message too many": lambda record: record.ledger_differences.append("measured, not predicted (1 times): ..."),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_one_bit_or_one_piece_is_enough(honest: Verified, rank: int, change: str) -> None:
    """The smallest change of any record, on any rank, is not bitwise; what is missing is not equal."""
    assert honest.verdict.word == "bitwise"
    ranks = copy.deepcopy(honest.ranks)
    CHANGES[change](ranks[rank])
    assert judged(CONFIG, ranks).verdict.word == "different"


def test_what_is_right_among_threads_is_told_as_it_was_first(honest: Verified) -> None:
    ranks = copy.deepcopy(honest.ranks)
    for change in ("parameter", "norm"):
        CHANGES[change](ranks[1])
    found, job = judged(CONFIG, ranks), job_of(CONFIG)
    told = placed(found.verdict, job, CONFIG, ranks, references(job, CONFIG, ranks))
    assert told.first is None and "RANK" in told.unplaced and "in the first run: norm step 3, rank 1: " in told.unplaced
    assert re.findall("norm|parameter", str(told).partition("DIFFERENT")[2]) == ["norm", "parameter"], "worst first"


ONE, TWO, NOTHING = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), as_tensor(None)
LOST = torch.tensor([1.0, math.nan])
FAR = (0.0, 0.1, math.inf, math.nan)
"""Spreads of honest runs that excuse nothing of 1."""
FOUND: list[tuple[torch.Tensor, torch.Tensor, dict[str, float], bool]] = [
    # ours, theirs, settings, equal
    (torch.tensor([1.0, -4.0, 2.0]), torch.tensor([1.0, -5.0, 2.5]), {"tolerance": 0.1}, False),
    (torch.tensor([1.0, -4.0, 2.0]), torch.tensor([1.0, -5.0, 2.5]), {"tolerance": 0.2}, True),
    (ONE, TWO, {"tolerance": 0.01, "spread": 0.2}, True),
    *((ONE, TWO, {"tolerance": 0.01, "spread": spread}, False) for spread in FAR),
    *((LOST, TWO, {"tolerance": 0.01, "spread": spread}, False) for spread in (0.2, *FAR)),
    (torch.tensor([1e-6]), torch.tensor([2e-6]), {"tolerance": 0.05}, False),
    (torch.tensor([1e-6]), torch.tensor([2e-6]), {"tolerance": 0.05, "beside": 1e-4}, True),
    *((torch.tensor([bad]), torch.ones(1), {"tolerance": 1e9}, False) for bad in (math.nan, math.inf)),
    *((torch.ones(1), torch.tensor([bad]), {"tolerance": 1e9}, False) for bad in (math.nan, math.inf)),
    (torch.zeros(3), torch.zeros(4), {"tolerance": 1.0}, False),
    (torch.zeros(0), torch.zeros(0), {}, True),
    (NOTHING, NOTHING, {}, True),
    *((NOTHING, as_tensor(1.0), {"tolerance": tolerance}, False) for tolerance in (0.0, 1e9)),
    *((as_tensor(1.0), NOTHING, {"tolerance": tolerance}, False) for tolerance in (0.0, 1e9)),
]


@pytest.mark.parametrize(("ours", "theirs", "settings", "equal"), FOUND)
def test_two_tensors_are_equal_within_what_is_asked(
    ours: torch.Tensor, theirs: torch.Tensor, settings: dict[str, float], equal: bool
) -> None:
    assert find("gradient", "w", ours, theirs, **settings).equal == equal  # type: ignore[arg-type]


def test_a_finding_measures_the_worst_element_against_the_tensor() -> None:
    finding = find("gradient", "w", torch.tensor([1.0, -4.0, 2.0]), torch.tensor([1.0, -5.0, 2.5]))
    assert (finding.max_abs, finding.max_rel, finding.bitwise) == (1.0, 0.2, False)


def test_engine_and_reference_take_the_same_root_of_the_squares() -> None:
    norms = run_threads.run(Mesh(), lambda comm: Norm(comm, TABLE["ddp"], {torch.float64}))
    pairs = torch.rand(4000, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norm = partial(norm_of, dtype=norms[0].dtype)
    assert any(
        norm(reference._square_sum(pair)) != reference._square_sum(pair) ** 0.5 for pair in pairs
    )  # a power may round apart
    for v, w in pairs:
        assert reference._clip({"v": v, "w": w}, 1e9, None) == norm(reference._square_sum([v, w]))
