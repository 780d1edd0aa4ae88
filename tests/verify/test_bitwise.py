"""The contract: every row, on every mesh, is to the bit the run of one process that adds in the same order.

Dropout on, clipping at work, ragged token counts, 13 samples that no mesh divides, 5 steps of AdamW. What is compared
is whole: every rank's losses, gradients, norm, parameters and optimizer state, and every message of the ledger.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import verify_cases as cases
from verify_cases import GPT, MLP, MODELS, Verified, verify

from plait.table.additions import additions
from plait.table.cells import TABLE, find_strategy

ROWS = tuple(TABLE)
MESHES = ("shard=2", "shard=4", "replica=2 shard=2", "replica=2")
OWN_ROW = "mine: shard | full | shard, pending(replica) | shard/replica"
"""A row of a user's, in text: psdp that keeps parameters from forward to backward."""
OTHER_WAY = "turned: replica | replica | replica/shard | replica/shard"
"""One that nests the axes the other way round."""

RUNS: dict[str, Verified] = {}


def runs(model: str, mesh: str, row: str, microbatches: int) -> Verified:
    """One layout's run, made once for all tests of this file."""
    key = f"{model} {mesh} {row} {microbatches}"
    if key not in RUNS:
        RUNS[key] = verify(MODELS[model], mesh=mesh, strategy=row, microbatches=microbatches)
    return RUNS[key]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_row_is_bitwise_its_reference(model: str, microbatches: int, mesh: str, row: str) -> None:
    result = runs(model, mesh, row, microbatches)
    assert result.verdict.word == "bitwise", result.different()
    assert not result.verdict.ledger
    norms = [norm for norm in result.ranks[0].norms if norm is not None]
    assert len(norms) == 5 and max(norms) > MODELS[model].clip, "clipping never came to work"


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=1", "replica=1 shard=2", "replica=2 shard=1", "shard=3"])
def test_any_axis_at_one_and_three_ranks(mesh: str, row: str) -> None:
    """An axis of one rank switches nothing off for the others."""
    assert runs("gpt", mesh, row, 2).verdict.word == "bitwise"


@pytest.mark.parametrize("row", ["ddp", "zero3", "hsdp", "psdp", "hpz"])
def test_six_ranks(row: str) -> None:
    """13 samples on 6 ranks with 2 microbatches: most hold one sample, one holds two."""
    assert runs("gpt", "replica=3 shard=2", row, 2).verdict.word == "bitwise"


@pytest.mark.parametrize("row", [*ROWS, OWN_ROW, OTHER_WAY])
@pytest.mark.parametrize("mesh", ["replica=2 shard=2 hosts=2", "replica=2 shard=3 hosts=2"])
def test_by_way_of_hosts(mesh: str, row: str) -> None:
    """What crosses hosts is summed inside of each first: other messages, as predicted, and the same order of sums."""
    result = runs("gpt", mesh, row, 2)
    assert result.verdict.word == "bitwise" and not result.verdict.ledger, result.different()


@pytest.mark.parametrize("cut", ["element", "tensor"])
def test_by_way_of_hosts_under_a_pipeline(cut: str) -> None:
    mesh = "pipe=2 replica=2 shard=2 hosts=4"
    result = verify(GPT, mesh=mesh, strategy="zero3", microbatches=3, schedule="1f1b", cut=cut)
    assert result.verdict.word == "bitwise" and not result.verdict.ledger, result.different()


@pytest.mark.parametrize("row", [OWN_ROW, OTHER_WAY])
@pytest.mark.parametrize("mesh", ["shard=2", "replica=2", "replica=2 shard=2"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_users_row_goes_through_everything(microbatches: int, mesh: str, row: str) -> None:
    assert runs("gpt", mesh, row, microbatches).verdict.word == "bitwise"


def same(ours: Verified, theirs: Verified) -> bool:
    """The same losses and parameters, bit for bit; norms are sums over other runs and may round differently."""
    for a, b in zip(ours.ranks, theirs.ranks, strict=True):
        if a.losses != b.losses or a.local_losses != b.local_losses or a.parameters.keys() != b.parameters.keys():
            return False
        if not all(torch.equal(a.parameters[name], b.parameters[name]) for name in a.parameters):
            return False
    return True


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tree", [("ddp", "zero1"), ("zero2", "zero3", "zero3_keep", "hpz"), ("hsdp", "psdp")])
def test_rows_with_one_tree_are_bitwise_equal_to_each_other(tree: tuple[str, ...], model: str, mesh: str) -> None:
    assert len({additions(find_strategy(row)) for row in tree}) == 1
    first = runs(model, mesh, tree[0], 3)
    for row in tree[1:]:
        assert same(first, runs(model, mesh, row, 3)), f"{row} on {mesh} is not {tree[0]}"


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_with_one_microbatch_all_rows_are_bitwise_equal(model: str, mesh: str, row: str) -> None:
    assert same(runs(model, mesh, "ddp", 1), runs(model, mesh, row, 1))


def test_other_trees_round_differently() -> None:
    """Otherwise the replay of the layout's own tree would prove nothing."""
    assert not same(runs("mlp", "replica=2 shard=2", "ddp", 3), runs("mlp", "replica=2 shard=2", "zero3", 3))


def test_losses_differ_per_rank_while_gradients_and_parameters_do_not() -> None:
    ranks = runs("mlp", "shard=4", "ddp", 3).ranks
    assert len({record.local_losses[0] for record in ranks}) == 4
    assert len({tuple(record.losses) for record in ranks}) == 1
    for record in ranks[1:]:
        for ours, theirs in zip(record.gradients, ranks[0].gradients, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[piece], theirs[piece]) for piece in ours)
        assert all(torch.equal(record.parameters[n], ranks[0].parameters[n]) for n in record.parameters)


@pytest.mark.parametrize("row", ["ddp", "zero3", "psdp"])
@pytest.mark.parametrize(("dtype", "optimizer"), [("fp64", "adamw"), ("fp64", "sgd"), ("fp32", "sgd")])
def test_dtypes_and_optimizers(dtype: str, optimizer: str, row: str) -> None:
    result = verify(GPT, mesh="replica=2 shard=2", strategy=row, microbatches=2, dtype=dtype, optimizer=optimizer)
    assert result.verdict.word == "bitwise", result.different()


@pytest.mark.parametrize(
    ("model", "mesh", "row"),
    [
        *(("gpt", "replica=2 shard=2", row) for row in ("zero1", "zero2", "zero3", "zero3_keep", "psdp", "hpz")),
        *(("gpt", "shard=3", row) for row in ("zero1", "zero3")),
        ("mlp", "shard=3", "zero3"),
    ],
)
def test_whole_tensor_ownership(model: str, mesh: str, row: str) -> None:
    """cut="tensor": every tensor has one owner, by broadcast and reduce."""
    result = verify(MODELS[model], mesh=mesh, strategy=row, microbatches=2, cut="tensor")
    assert result.verdict.word == "bitwise", result.different()


@pytest.mark.parametrize("prefetch", [0, 2, 99])
@pytest.mark.parametrize("row", ["zero3", "hpz"])
def test_how_far_ahead_units_are_gathered_changes_no_bit(row: str, prefetch: int) -> None:
    result = verify(GPT, mesh="replica=2 shard=2", strategy=row, microbatches=3, prefetch=prefetch)
    assert result.verdict.word == "bitwise"
    assert same(result, runs("gpt", "replica=2 shard=2", row, 3))


def test_the_same_layout_twice_is_the_same_run() -> None:
    again = verify(MLP, mesh="shard=4", strategy="zero3", microbatches=3)
    assert same(again, runs("mlp", "shard=4", "zero3", 3))


def test_without_clipping() -> None:
    result = verify(replace(cases.TINY, clip=None), mesh="shard=2", strategy="zero3")
    assert result.verdict.word == "bitwise" and set(result.ranks[0].norms) == {None}
