"""A tensor axis under every row: the single process's run, up to the order in which a product is added.

Matrix products are split, so no replay can have the same bits.  In fp64 what remains is rounding: the first step's
losses, gradients and norm are held to 1e-12, parameters and state to what rounding becomes in a few steps.
Dropout on, clipping at work, ragged token counts, 13 samples that no mesh divides, 9 steps of time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from verify_cases import MLP, Verified, verify

from plait.run.config import VerifyConfig, validate
from plait.table.cells import TABLE

ROWS = tuple(TABLE)
MESHES = ("tensor=2", "tensor=4", "tensor=3", "shard=2 tensor=2", "replica=2 shard=2 tensor=2")
GPT = VerifyConfig(
    model="gpt", layers=2, width=24, heads=6, kv_heads=6, batch=13, length=9, steps=2, clip=0.3, dtype="fp64"
)
"""Six heads for 2 and 3 ranks; 64 hidden features and 256 classes, which 3 ranks share unevenly."""
FOUR = replace(GPT, width=32, heads=8, kv_heads=4)
"""Grouped heads for 4 ranks."""
LLAMA = replace(FOUR, model="llama", dropout=0.2)
DEEP = replace(MLP, layers=7, width=17, steps=3, dtype="fp64", dropout=0.2)
"""Pairs of layers with biases, 17 features for 2, 3 and 4 ranks."""

RUNS: dict[str, Verified] = {}


def runs(config: VerifyConfig, mesh: str, row: str, **changes: object) -> Verified:
    """One layout's run, made once for all tests of this file."""
    config = replace(config, mesh=mesh, strategy=row, **changes)
    key = repr(config)
    if key not in RUNS:
        validate(config)
        RUNS[key] = verify(config)
    return RUNS[key]


def gpt(mesh: str, row: str, *, sequence: bool, microbatches: int = 1, **changes: object) -> Verified:
    config = FOUR if "tensor=4" in mesh else GPT
    return runs(config, mesh, row, sequence_parallel=sequence, microbatches=microbatches, **changes)


def is_equal(result: Verified, clip: float = 0.3) -> None:
    """Equal, nothing left out, and clipping came to work."""
    assert result.verdict.word == "equal", result.different()
    assert {f.kind for f in result.verdict.tree} >= {"loss", "gradient", "norm", "parameter"}
    norms = [norm for norm in result.ranks[0].norms if norm is not None]
    assert norms and max(norms) > clip, "clipping never came to work"


def first_step(result: Verified) -> float:
    """The largest relative error of the first step's losses, gradients and norm."""
    found = [
        f.max_rel if f.measure == "relative" and f.tolerance == 1e-12 else f.measured
        for f in (*result.verdict.tree, *result.verdict.plain)
        if f.kind in ("loss", "gradient", "norm") and "step 1" in f.name
    ]
    assert found
    return max(found)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("sequence", "microbatches"), [(False, 1), (True, 3)], ids=["whole-M=1", "sequence-M=3"])
def test_every_row_is_the_single_process(sequence: bool, microbatches: int, mesh: str, row: str) -> None:
    many = "replica" in mesh and microbatches > 1  # eight ranks on the cores of one machine
    result = gpt(mesh, row, sequence=sequence, microbatches=2 if many else microbatches)
    is_equal(result)
    assert first_step(result) < 1e-13, "fp64 leaves room for nothing but rounding"


@pytest.mark.parametrize("row", ["ddp", "zero3", "psdp"])
@pytest.mark.parametrize("mesh", ["tensor=3", "shard=2 tensor=2"])
@pytest.mark.parametrize(("sequence", "microbatches"), [(False, 3), (True, 1)], ids=["whole-M=3", "sequence-M=1"])
def test_microbatches_and_sequence_parallelism_the_other_way_round(
    sequence: bool, microbatches: int, mesh: str, row: str
) -> None:
    is_equal(gpt(mesh, row, sequence=sequence, microbatches=microbatches))


@pytest.mark.parametrize("mesh", ["tensor=1", "replica=1 shard=2 tensor=1"])
def test_a_tensor_axis_of_one_rank_changes_no_bit(mesh: str) -> None:
    for sequence in (False, True):
        assert gpt(mesh, "zero3", sequence=sequence).verdict.word == "bitwise"


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("mesh", "row"), [("tensor=2", "ddp"), ("shard=2 tensor=2", "zero3"), ("tensor=3", "zero2")])
def test_plain_sgd_is_held_to_its_parameters(mesh: str, row: str, sequence: bool) -> None:
    is_equal(gpt(mesh, row, sequence=sequence, microbatches=2, optimizer="sgd", steps=3))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("mesh", "row"), [("tensor=2", "zero1"), ("shard=2 tensor=2", "zero3"), ("tensor=4", "ddp")])
def test_in_fp32(mesh: str, row: str, sequence: bool) -> None:
    is_equal(gpt(mesh, row, sequence=sequence, microbatches=2, dtype="fp32"))


@pytest.mark.parametrize("sequence", [False, True])
def test_in_bf16(sequence: bool) -> None:
    is_equal(gpt("shard=2 tensor=2", "zero3", sequence=sequence, dtype="bf16"))


def test_a_users_row() -> None:
    row = "mine: shard | full | shard, pending(replica) | shard/replica"
    is_equal(gpt("replica=2 shard=2 tensor=2", row, sequence=True, microbatches=2))


@pytest.mark.parametrize("row", ["ddp", "zero3", "hsdp"])
@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=4", "shard=2 tensor=2"])
def test_a_stock_llama(mesh: str, row: str) -> None:
    """Without sequence parallelism and with it, though its code knows nothing of either."""
    pytest.importorskip("transformers")
    for sequence in (False, True):
        is_equal(runs(LLAMA, mesh, row, microbatches=1 + 2 * (mesh == "tensor=2"), sequence_parallel=sequence))


def test_a_stock_qwen_with_biases_on_its_projections() -> None:
    pytest.importorskip("transformers")
    for sequence in (False, True):
        is_equal(runs(replace(LLAMA, model="qwen2"), "shard=2 tensor=2", "zero3", sequence_parallel=sequence))


@pytest.mark.parametrize("row", ["ddp", "zero3", "psdp"])
@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=3", "tensor=4", "replica=2 shard=2 tensor=2"])
def test_pairs_of_layers_with_biases(mesh: str, row: str) -> None:
    is_equal(runs(DEEP, mesh, row, microbatches=2))


@pytest.mark.parametrize("row", ["zero1", "zero3", "psdp"])
@pytest.mark.parametrize("mesh", ["shard=2 tensor=3"])
@pytest.mark.parametrize("sequence", [False, True])
def test_whole_tensor_ownership(sequence: bool, mesh: str, row: str) -> None:
    """cut="tensor": tensor ranks hold pieces of unlike sizes, and must choose the same owners where they sum."""
    is_equal(gpt(mesh, row, sequence=sequence, cut="tensor"))


@pytest.mark.parametrize("prefetch", [0, 99])
def test_how_far_ahead_units_are_gathered_changes_no_bit(prefetch: int) -> None:
    result = gpt("shard=2 tensor=2", "zero3", sequence=True, microbatches=3, prefetch=prefetch)
    is_equal(result)
    assert same(result, gpt("shard=2 tensor=2", "zero3", sequence=True, microbatches=3))


def same(ours: Verified, theirs: Verified) -> bool:
    """Losses, norms, every gradient and every parameter, bit for bit."""
    for a, b in zip(ours.ranks, theirs.ranks, strict=True):
        if (a.losses, a.local_losses, a.norms) != (b.losses, b.local_losses, b.norms):
            return False
        for left, right in zip([*a.gradients, a.parameters], [*b.gradients, b.parameters], strict=True):
            if left.keys() != right.keys() or not all(torch.equal(left[key], right[key]) for key in left):
                return False
    return True


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mesh", ["tensor=3", "shard=2 tensor=2"])
def test_the_same_layout_twice_is_the_same_run(mesh: str, sequence: bool) -> None:
    config = replace(GPT, mesh=mesh, strategy="zero3", sequence_parallel=sequence, dtype="fp32")
    assert same(verify(config), verify(config))


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_agree_to_the_bit_on_everything_whole(sequence: bool) -> None:
    ranks = gpt("tensor=3", "ddp", sequence=sequence, microbatches=3 if sequence else 1).ranks
    for record in ranks[1:]:
        assert (record.losses, record.local_losses) == (ranks[0].losses, ranks[0].local_losses)
        assert all(torch.equal(record.parameters[n], ranks[0].parameters[n]) for n in record.parameters)
        for ours, first in zip(record.gradients, ranks[0].gradients, strict=True):
            whole = [piece for piece in ours if piece[0] not in record.cuts]
            assert whole and all(torch.equal(ours[piece], first[piece]) for piece in whole)


def test_processes_make_the_same_run(tmp_path: Path) -> None:
    """Two real processes, with sequence parallelism; their ledger is as predicted too."""
    out = tmp_path / "verdict.json"
    words = {"mesh": "tensor=2", "strategy": "zero3", "json": str(out), "world": "process", "dtype": "fp64"}
    sizes = {"layers": 2, "width": 24, "heads": 6, "kv-heads": 6, "batch": 13, "length": 9, "steps": 2, "clip": 0.3}
    flags = [f"--{name}={value}" for name, value in {**words, **sizes}.items()]
    command = [sys.executable, "-m", "plait", "verify", *flags, "--sequence-parallel"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    assert told["verdict"] == "equal" and not told["ledger_differences"]
    assert told["command"].startswith("plait verify --")
    threads = gpt("tensor=2", "zero3", sequence=True).verdict.tree
    assert [f["name"] for f in told["against_tree"]] == [f.name for f in threads], "nothing is left out"
    assert max(f["max_rel"] for f in told["against_tree"] if f["kind"] == "gradient") < 1e-13
