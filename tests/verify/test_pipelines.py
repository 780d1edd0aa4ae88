"""The contract over the pipe axis: any order of work, to the bit the run of one process that adds in the same order.

Every order, on 2 to 4 pipeline ranks, with 5 to 8 microbatches.  Links that no number of stages divides, tied
embeddings, dropout on, clipping at work, ragged token counts, samples that nothing divides.

Up to 4 microbatches, every two of order, ranks, microbatches, row, model, cut, hold and split meet in the small matrix
(test_matrix.py).  Here is what it does not have: more microbatches, more stages, other numbers, and what must be equal
to each other.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from pipe_cases import CHAIN, DECODER, is_bitwise, runs, same
from verify_cases import GPT, verify

from plait.run.config import VerifyConfig
from plait.schedule.orders import ORDERS
from plait.table.cells import TABLE

ROWS = tuple(TABLE)
PIPES = (2, 3, 4)


# ---- every order, every size --------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [5, 7, 8])
@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_on_every_size(order: str, pipe: int, microbatches: int) -> None:
    is_bitwise(runs(CHAIN, f"pipe={pipe}", schedule=order, microbatches=microbatches))


@pytest.mark.parametrize("microbatches", [5, 6, 7, 8])
@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_decoder_with_tied_embeddings(order: str, pipe: int, microbatches: int) -> None:
    result = runs(DECODER, f"pipe={pipe}", schedule=order, microbatches=microbatches)
    is_bitwise(result)
    (uses,) = result.ranks[0].ties.values()
    assert len(uses) == 2, "the head shares the embedding's weight with another stage"


@pytest.mark.parametrize("microbatches", [1, 4, 7])
@pytest.mark.parametrize("pipe", PIPES)
def test_interleaved_with_more_stages_on_a_rank(pipe: int, microbatches: int) -> None:
    config = replace(CHAIN, layers=13)
    is_bitwise(runs(config, f"pipe={pipe}", schedule="interleaved", chunks=3, microbatches=microbatches))


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_on_one_rank(order: str) -> None:
    """Several stages then, or backwards in two parts, without any message between stages."""
    is_bitwise(runs(CHAIN, "pipe=1 shard=2", schedule=order, microbatches=5))


def test_the_default_is_1f1b() -> None:
    assert same(runs(CHAIN, "pipe=3", microbatches=4), runs(CHAIN, "pipe=3", schedule="1f1b", microbatches=4))


@pytest.mark.parametrize(
    ("config", "order", "pipe", "split"),
    [
        (CHAIN, "1f1b", 3, "1 3 7"),
        (CHAIN, "zb_h1", 3, "8 2 1"),
        (CHAIN, "interleaved", 2, "1 6 1 3"),
        (CHAIN, "zbv", 3, "1,2,3,3,1,1"),
        (CHAIN, "dualpipe_v", 2, "4 1 1 5"),
        (DECODER, "gpipe", 3, "1 7 1"),
        (DECODER, "zb_h2", 3, "7 1 1"),
        (DECODER, "1f1b", 3, "2 6 1"),
        (DECODER, "interleaved", 2, "1 1 1 6"),
        (DECODER, "zbv", 2, "1 1 6 1"),
        (DECODER, "1f1b", 2, "measured"),
        (CHAIN, "zbv", 2, "measured"),
    ],
)
def test_splits_of_any_kind(config: VerifyConfig, order: str, pipe: int, split: str) -> None:
    is_bitwise(runs(config, f"pipe={pipe}", schedule=order, microbatches=3, split=split))


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zb_h1"])
def test_as_many_stages_as_links(order: str) -> None:
    """A norm alone is a stage, and so is the head."""
    is_bitwise(runs(replace(DECODER, layers=1), "pipe=4", schedule=order, microbatches=3))


@pytest.mark.parametrize("order", ["1f1b", "zbv", "dualpipe_v"])
@pytest.mark.parametrize("config", [CHAIN, DECODER], ids=["mlp", "gpt"])
def test_samples_of_one_length(config: VerifyConfig, order: str) -> None:
    is_bitwise(runs(replace(config, batch=17), "pipe=2", schedule=order, microbatches=5, ragged=False))


# ---- with data parallelism ----------------------------------------------------------------------------------------

BESIDE = ("1f1b", "interleaved", "zb_h1", "zbv", "gpipe", "zb_h2", "dualpipe_v")


@pytest.mark.parametrize(("at", "row"), list(enumerate(ROWS)), ids=ROWS)
@pytest.mark.parametrize(("mesh", "later"), [("pipe=2 shard=2", 5), ("pipe=2 replica=2 shard=2", 8)])
def test_every_row_on_every_pipeline_rank(mesh: str, later: int, at: int, row: str) -> None:
    order = BESIDE[(at + later) % len(BESIDE)]
    is_bitwise(runs(replace(CHAIN, batch=21), mesh, schedule=order, strategy=row, microbatches=5))


@pytest.mark.parametrize(("at", "row"), list(enumerate(ROWS)), ids=ROWS)
def test_every_row_on_a_decoder(at: int, row: str) -> None:
    order = BESIDE[(at + 2) % len(BESIDE)]
    is_bitwise(runs(DECODER, "pipe=2 replica=2 shard=2", schedule=order, strategy=row, microbatches=3))


@pytest.mark.parametrize("order", ORDERS)
def test_one_row_under_every_order(order: str) -> None:
    """Odd axes, and gathers of a stage at a time."""
    is_bitwise(runs(CHAIN, "pipe=3 shard=3", schedule=order, strategy="zero3", microbatches=4))


@pytest.mark.parametrize(
    ("order", "row"),
    [("1f1b", "zero1"), ("zbv", "zero3"), ("interleaved", "psdp"), ("zb_h1", "zero2"), ("1f1b", "hpz")],
)
def test_whole_tensor_ownership(order: str, row: str) -> None:
    """cut="tensor": a rank may own nothing of a stage, or nothing of a tied weight."""
    is_bitwise(runs(DECODER, "pipe=2 shard=3", schedule=order, strategy=row, microbatches=3, cut="tensor"))


@pytest.mark.parametrize("prefetch", [0, 99])
def test_how_far_ahead_units_are_gathered_changes_no_bit(prefetch: int) -> None:
    layout = {"mesh": "pipe=2 shard=2", "schedule": "interleaved", "strategy": "zero3", "microbatches": 3}
    result = runs(DECODER, prefetch=prefetch, **layout)
    is_bitwise(result)
    assert same(result, runs(DECODER, **layout))


@pytest.mark.parametrize(
    ("config", "hold", "order", "row"),
    [
        *((CHAIN, 0, *pair) for pair in (("interleaved", "zero3"), ("zbv", "hsdp"), ("zb_h2", "zero3"))),
        *((CHAIN, 2, *pair) for pair in (("interleaved", "hpz"), ("zbv", "zero3"), ("dualpipe_v", "zero3_keep"))),
        *((DECODER, None, *pair) for pair in (("interleaved", "zero3_keep"), ("zbv", "hpz"), ("gpipe", "psdp"))),
        (DECODER, None, "1f1b", "zero3"),
    ],
)
def test_how_long_stages_are_held_changes_no_bit(config: VerifyConfig, hold: int | None, order: str, row: str) -> None:
    """hold=None gathers unit by unit, with several microbatches of a stage under way."""
    mesh = "pipe=2 replica=2 shard=2" if row in ("hpz", "psdp") else "pipe=2 shard=2"
    is_bitwise(runs(config, mesh, schedule=order, strategy=row, microbatches=3, hold=hold))


@pytest.mark.parametrize("order", ["1f1b", "zbv"])
def test_a_users_row(order: str) -> None:
    row = "mine: shard | full | shard, pending(replica) | shard/replica"
    is_bitwise(runs(DECODER, "pipe=2 replica=2 shard=2", schedule=order, strategy=row, microbatches=3))


# ---- numbers, optimizers, other models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "order", "row"),
    [(CHAIN, "1f1b", "zero3"), (CHAIN, "zb_h1", "ddp"), (DECODER, "zbv", "zero2"), (DECODER, "interleaved", "zero3")],
    ids=["mlp-1f1b", "mlp-zb_h1", "gpt-zbv", "gpt-interleaved"],
)
@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "sgd", "dtype": "fp64"}, {"dtype": "fp64"}, {"dtype": "bf16"}, {"clip": None}],
    ids=["sgd-fp64", "fp64", "bf16", "no-clip"],
)
def test_dtypes_optimizers_and_no_clipping(
    config: VerifyConfig, changes: dict[str, object], order: str, row: str
) -> None:
    result = runs(config, "pipe=2 shard=2", schedule=order, strategy=row, microbatches=3, **changes)
    clip = changes.get("clip", 0.3)
    is_bitwise(result, clip if isinstance(clip, float) else None)


LLAMA = replace(DECODER, model="llama", width=32, heads=8, kv_heads=4, dropout=0.2, layers=3)


@pytest.mark.parametrize("mesh", ["pipe=2", "pipe=3", "pipe=2 shard=2"])
@pytest.mark.parametrize("order", ["1f1b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_a_stock_decoder_of_transformers(model: str, order: str, mesh: str) -> None:
    """Not a line of it is changed; it tells of its links in a plan for pipelines."""
    pytest.importorskip("transformers")
    is_bitwise(runs(replace(LLAMA, model=model), mesh, schedule=order, microbatches=3))


# ---- with a tensor axis: to rounding ------------------------------------------------------------------------------

HEADS = replace(GPT, width=24, heads=6, kv_heads=6, layers=3, length=9, steps=2, dtype="fp64")


@pytest.mark.parametrize(
    ("mesh", "order", "row", "microbatches"),
    [
        ("pipe=2 tensor=2", "1f1b", "ddp", 3),
        ("pipe=2 tensor=2", "zb_h1", "zero1", 4),
        ("pipe=2 tensor=2", "zbv", "zero3", 3),
        ("pipe=3 tensor=2", "gpipe", "zero2", 2),
        ("pipe=2 tensor=3", "dualpipe_v", "ddp", 3),
        ("pipe=2 shard=2 tensor=2", "1f1b", "zero3", 3),
        ("pipe=2 shard=2 tensor=2", "interleaved", "zero3", 8),
        ("pipe=2 shard=2 tensor=2", "zbv", "hpz", 2),
    ],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_tensor_axis_in_every_stage(mesh: str, order: str, row: str, microbatches: int, sequence: bool) -> None:
    layout = {"schedule": order, "strategy": row, "microbatches": microbatches, "sequence_parallel": sequence}
    result = runs(replace(HEADS, batch=17), mesh, **layout)
    assert result.verdict.word == "equal", result.different()
    first = [f for f in (*result.verdict.tree, *result.verdict.plain) if "step 1" in f.name and f.tolerance == 1e-12]
    assert {f.kind for f in first} == {"loss", "norm", "gradient"}
    assert max(f.measured for f in first) < 1e-13, "fp64 leaves room for nothing but rounding"


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_a_stock_decoder_whose_stream_is_cut_in_time(model: str) -> None:
    """Its own code around the links asks for the length of the whole stream, odd here."""
    pytest.importorskip("transformers")
    config = replace(LLAMA, model=model, heads=4, kv_heads=2, dropout=0.0, length=9, dtype="fp64")
    result = runs(config, "pipe=2 tensor=2", schedule="1f1b", microbatches=2, sequence_parallel=True)
    assert result.verdict.word == "equal", result.different()


# ---- the same run, however it is laid out -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["1f1b", "zbv"])
@pytest.mark.parametrize("mesh", ["pipe=3", "pipe=2 shard=2"])
def test_the_same_layout_twice_is_the_same_run(mesh: str, order: str) -> None:
    config = replace(DECODER, mesh=mesh, schedule=order, microbatches=4)
    first, again = verify(config), verify(config)
    assert same(first, again)
    for ours, theirs in zip(first.ranks, again.ranks, strict=True):
        assert ours.norms == theirs.norms
        for left, right in zip(ours.gradients, theirs.gradients, strict=True):
            assert left.keys() == right.keys() and all(torch.equal(left[piece], right[piece]) for piece in left)


def test_no_order_changes_a_bit() -> None:
    """Clipping is left out: how a rank's squares are cut into runs decides how their sum is rounded."""
    config = replace(CHAIN, clip=None)
    first = runs(config, "shard=1", microbatches=6)
    for order, pipe in product(ORDERS, PIPES):
        assert same(first, runs(config, f"pipe={pipe}", schedule=order, microbatches=6)), f"{order} on {pipe}"


@pytest.mark.parametrize(("config", "mesh"), [(CHAIN, "shard=2"), (DECODER, "pipe=4 shard=2")], ids=["mlp", "gpt"])
def test_with_one_microbatch_all_rows_are_bitwise_equal(config: VerifyConfig, mesh: str) -> None:
    """One tree, whatever the row and the pipeline; but one stage adds the uses of a tied weight before all else."""
    config = replace(config, clip=None)
    first = runs(config, mesh, strategy="ddp")
    for at, row in enumerate(ROWS):
        for mesh in ("pipe=2 shard=2", "pipe=3 shard=2"):
            assert same(first, runs(config, mesh, strategy=row, schedule=BESIDE[at % 7])), f"{row} on {mesh}"
