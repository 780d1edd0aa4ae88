"""torch's own engines as oracles: DDP, FSDP2 and ZeroRedundancyOptimizer reach the same numbers as our rows.

Two processes over gloo train one small decoder (tied, odd widths, distinct weights) for four steps under
each engine. fp64 gives the sharp tolerance; in fp32 Adam turns the rounding of tiny gradients into steps, so
its parameters are also held against the distance they can have moved, lr * steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ports import free_port, spawn

ORACLE = {
    "ddp": "torch-ddp",
    "zero1": "torch-redundancy",
    "zero2": "torch-fsdp2",
    "zero3": "torch-fsdp2",
    "zero3, 2 microbatches": "torch-fsdp2",
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
LEARNING_RATE, NUM_STEPS = {"adamw": 1e-3, "sgd": 0.1}, 4

Found = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Losses and final parameters of everyone, from one pair of processes."""
    path = tmp_path_factory.mktemp("oracle") / "found.pt"
    ranks = importlib.import_module("oracle_ranks")
    spawn(ranks.rank_main, ranks.RANKS, free_port(), str(path))
    result: Found = torch.load(path, weights_only=True)
    return result


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """max|a-b| / max|b|"""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def losses(run: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(run["losses"], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("row", ORACLE)
def test_row_trains_to_the_numbers_of_its_peer(found: Found, row: str, optimizer: str, dtype: torch.dtype) -> None:
    ours, theirs = found[f"{row}/{optimizer}/{dtype}"], found[f"{ORACLE[row]}/{optimizer}/{dtype}"]
    assert error(losses(ours), losses(theirs)) <= TOLERANCE[dtype], (ours["losses"], theirs["losses"])
    assert ours["parameters"].keys() == theirs["parameters"].keys()
    for name, expected in theirs["parameters"].items():
        value = ours["parameters"][name]
        assert value.dtype == dtype and value.shape == expected.shape, name
        moved = LEARNING_RATE["adamw"] * NUM_STEPS
        difference = float((value - expected).abs().max())
        if optimizer == "adamw" and dtype == torch.float32:
            assert difference <= 0.05 * moved, (name, difference, moved)
        else:
            assert error(value, expected) <= TOLERANCE[dtype], (name, error(value, expected))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_oracles_agree_with_each_other_and_moved_every_parameter(found: Found, optimizer: str) -> None:
    """Otherwise the comparison above would prove nothing."""
    runs = [found[f"{name}/{optimizer}/torch.float64"] for name in dict.fromkeys(ORACLE.values())]
    for run in runs:
        assert error(losses(run), losses(runs[0])) <= TOLERANCE[torch.float64]
        for name, start in found["initial/torch.float64"]["parameters"].items():
            assert error(run["parameters"][name], start) > 1e-4, name
