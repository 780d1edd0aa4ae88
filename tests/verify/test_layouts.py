"""Layouts against one process that adds in the same order: the same bits, or rounding where products are split.

The matrix (test_matrix.py) has every two settings of a layout together, with up to 4 microbatches.  These are the
layouts that it does not have: more microbatches and stages, rows written by hand, other numbers, stock models; and
layouts that must be one run to the bit.  Dropout is on, clipping works, token counts are ragged, samples do not divide.
"""

# ruff: noqa: E501 (a row is a line)

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from verify_cases import CHAIN, DECODER, GPT, HEADS, MLP, TINY, record, verify

from plait.referee.verify.cases import command, due
from plait.referee.verify.covering import covering
from plait.referee.verify.observed import RankRecord
from plait.referee.verify.run import judge, references
from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import make_job
from plait.schedule.orders import ORDERS
from plait.table.additions import additions
from plait.table.cells import TABLE, find_strategy

OWN_ROW = "mine: shard | full | shard, pending(replica) | shard/replica"
"""A row of a user's, in text: psdp that keeps parameters from forward to backward."""
OTHER_WAY = "turned: replica | replica | replica/shard | replica/shard"
"""One that nests the axes the other way round."""
OWN_DTYPES = "mine: shard bf16 | full bf16 | shard fp32, pending(replica) | shard/replica fp64"

FOUR, BOTH = "replica=2 shard=2", "pipe=2 shard=2"
LLAMA = replace(GPT, model="llama", layers=3, width=32, heads=8, kv_heads=4, dropout=0.2, steps=2)
DEEP = replace(MLP, layers=7, width=17, steps=3, dtype="fp64", dropout=0.2)
"""Pairs of layers with biases, 17 features for 2, 3 and 4 ranks."""


def pairs(job: VerifyConfig, **dimensions: Any) -> Iterator[VerifyConfig]:
    """Layouts of a job in which every two values meet; a dict is several settings that go together."""
    for case in covering({name: range(len(values)) for name, values in dimensions.items()}):
        chosen: dict[str, Any] = {name: dimensions[name][i] for name, i in case.items()}  # type: ignore[index]
        together = [value for value in chosen.values() if isinstance(value, dict)]
        alone = {name: value for name, value in chosen.items() if not isinstance(value, dict)}
        yield replace(job, **alone | {key: value for one in together for key, value in one.items()})


def each(job: VerifyConfig, *layouts: dict[str, Any]) -> list[VerifyConfig]:
    return [replace(job, **layout) for layout in layouts]


PIPES = tuple(f"pipe={ranks}" for ranks in (2, 3, 4))
WHOLE_OR_CUT = ({"sequence_parallel": False}, {"sequence_parallel": True, "microbatches": 2})

LAYOUTS = [
    # data axes
    *pairs(replace(GPT, steps=3, batch=21), microbatches=(1, 3), mesh=("shard=2", "replica=2", FOUR, "replica=2 shard=3 hosts=2"), strategy=(OWN_ROW, OTHER_WAY)),
    *each(GPT, {"mesh": "pipe=2 replica=2 shard=2 hosts=4", "strategy": "zero3", "microbatches": 3, "schedule": "1f1b", "cut": "tensor"}),
    *each(TINY, {"mesh": "shard=2", "strategy": "zero3", "clip": None}),
    # pipelines
    *each(CHAIN, *({"schedule": order, "mesh": PIPES[i % 2], "microbatches": 5 + i % 3} for i, order in enumerate(ORDERS))),
    *each(replace(CHAIN, layers=13, schedule="interleaved", chunks=3), *({"mesh": mesh, "microbatches": m} for mesh, m in zip(PIPES, (7, 1, 4), strict=True))),
    *pairs(replace(CHAIN, mesh="pipe=1 shard=2", microbatches=5), schedule=("naive", "1f1b", "zbv")),
    *each(replace(CHAIN, schedule="zbv", mesh="pipe=3 shard=3", strategy="zero3", microbatches=4), {}),
    *(replace(CHAIN, schedule=order, mesh=mesh, split=split, microbatches=3) for order, mesh, split in (
        *(("1f1b", "pipe=3", "1 3 7"), ("zb_h1", "pipe=3", "8 2 1"), ("interleaved", "pipe=2", "1 6 1 3")),
        *(("zbv", "pipe=3", "1,2,3,3,1,1"), ("dualpipe_v", "pipe=2", "4 1 1 5")),
    )),
    *(replace(DECODER, schedule=order, mesh=mesh, split=split, microbatches=3) for order, mesh, split in (
        *(("gpipe", "pipe=3", "1 7 1"), ("zb_h2", "pipe=3", "7 1 1"), ("1f1b", "pipe=3", "2 6 1")),
        *(("interleaved", "pipe=2", "1 1 1 6"), ("zbv", "pipe=2", "1 1 6 1"), ("1f1b", "pipe=2", "5 4")),
    )),
    *pairs(replace(DECODER, mesh="pipe=2 replica=2 shard=2", strategy=OWN_ROW, microbatches=3), schedule=("1f1b", "zbv")),
    *pairs(LLAMA, model=("llama", "qwen2"), mesh=("pipe=3", BOTH), schedule=("1f1b", "zb_h1", "interleaved"), microbatches=(3,)),
    # a tensor axis
    *pairs(replace(HEADS, batch=17), way=WHOLE_OR_CUT, layout=(
        {"mesh": "pipe=2 tensor=2", "schedule": "zb_h1", "strategy": "zero1"},
        {"mesh": "pipe=2 tensor=3", "schedule": "dualpipe_v", "strategy": "ddp"},
        {"mesh": "pipe=2 shard=2 tensor=2", "schedule": "interleaved", "strategy": "zero3", "microbatches": 8},
    )),
    *pairs(replace(HEADS, mesh="shard=2 tensor=2", strategy="zero3"), way=WHOLE_OR_CUT, numbers=({"optimizer": "sgd", "steps": 3}, {"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16-mixed"})),
    *each(HEADS, {"mesh": "tensor=1", "strategy": "zero3", "sequence_parallel": True}, {"mesh": "replica=2 shard=2 tensor=2", "strategy": OWN_ROW, "sequence_parallel": True, "microbatches": 2}),
    *pairs(replace(LLAMA, dtype="fp64", length=9), way=WHOLE_OR_CUT, model=("llama", "qwen2"), layout=({"mesh": "tensor=4", "strategy": "ddp", "kv_heads": 4}, {"mesh": "shard=2 tensor=2", "strategy": "hsdp"}, {"mesh": "pipe=2 tensor=2", "schedule": "1f1b", "strategy": "ddp"})),
    # dtypes and recomputation
    *each(replace(DECODER, dropout=0.2), {"mesh": FOUR, "strategy": OWN_DTYPES, "microbatches": 2}, {"mesh": "pipe=2", "dtype": "bf16-mixed", "split": "4 5", "schedule": "1f1b", "microbatches": 2}),
    *pairs(replace(GPT, steps=2, recompute="selective"), layout=({"mesh": "shard=2", "strategy": "zero3"}, {"mesh": "shard=2", "strategy": "hpz"}, *({"mesh": "pipe=2", "schedule": order, "microbatches": 4} for order in ("1f1b", "zb_h1", "dualpipe_v")))),
    *pairs(replace(DEEP, mesh="tensor=2", recompute="full", microbatches=2), strategy=("ddp", "zero2")),
    # sizes that do not divide
    *each(VerifyConfig(steps=2, clip=0.1),
        {"mesh": "shard=5", "batch": 7},
        {"mesh": "shard=4", "model": "mlp", "width": 1, "layers": 1},
        {"mesh": "shard=4", "width": 2, "heads": 1, "kv_heads": 1, "layers": 1, "batch": 4},
        {"mesh": "pipe=2", "layers": 1},
        {"mesh": "pipe=4", "schedule": "zbv", "layers": 6},
        {"mesh": "tensor=3", "dtype": "fp64", "heads": 3, "kv_heads": 3, "width": 96, "length": 7, "sequence_parallel": True},
        {"mesh": "tensor=5", "dtype": "fp64", "heads": 5, "kv_heads": 5, "width": 50},
        {"mesh": "tensor=7", "dtype": "fp64", "model": "mlp", "width": 3, "layers": 4},
        {"mesh": "shard=3 tensor=2", "dtype": "fp64", "model": "mlp", "width": 5, "layers": 5, "batch": 5},
    ),
]  # fmt: skip


def name_of(config: VerifyConfig) -> str:
    return command(config).removeprefix("plait verify ")


@pytest.mark.parametrize("config", {name_of(config): config for config in LAYOUTS}.values(), ids=name_of)
def test_a_layout_is_the_run_of_one_process(config: VerifyConfig) -> None:
    """Every message as predicted, nothing left out, and clipping came to work."""
    if config.task.network.model in ("llama", "qwen2"):
        pytest.importorskip("transformers")
    validate(config)
    result = verify(config)
    verdict, due_kinds = (
        result.verdict,
        {"loss", "gradient", "parameter"} | ({"norm"} if config.task.update.clip else set()),
    )
    assert verdict.word == due(config), result.different()
    assert not verdict.ledger and {f.kind for f in verdict.tree} >= due_kinds
    if config.task.update.clip is not None and config.task.network.dtype != "bf16-mixed":
        assert max(norm for norm in result.ranks[0].norms if norm is not None) > config.task.update.clip, "no clipping"
    split = config.machine.parsed_mesh.tensor > 1
    first = [f for f in (*verdict.tree, *verdict.plain) if split and "step 1" in f.name and f.tolerance == 1e-12]
    assert max((f.measured for f in first), default=0) < 1e-13, "fp64 leaves room for nothing but rounding"


def ranks_of(config: VerifyConfig, **changes: Any) -> list[RankRecord]:
    config = replace(config, **changes)
    validate(config)
    return record(config)


def same(ours: list[RankRecord], theirs: list[RankRecord]) -> bool:
    """The same losses and parameters, bit for bit, on every rank; norms are sums over other runs."""
    every = [*ours, *theirs]
    first = every[0]
    locals_ = {one.data_rank: [step.losses for step in one.steps] for one in every}
    return all(
        one.losses == first.losses
        and [step.losses for step in one.steps] == locals_[one.data_rank]
        and one.parameters.keys() == first.parameters.keys()
        and all(torch.equal(one.parameters[name], first.parameters[name]) for name in first.parameters)
        for one in every
    )


TREES = (("ddp", "zero1"), ("zero2", "zero3", "zero3_keep", "hpz"), ("hsdp", "psdp"))
UNCLIPPED = replace(CHAIN, clip=None)
"""The cut of a rank's squares into runs decides how their sum is rounded."""
AHEAD = (0, 99)
ONE_RUN: dict[str, list[VerifyConfig]] = {
    **{f"one tree: {' '.join(rows)}": each(replace(MLP, steps=2, mesh=FOUR, microbatches=3), *({"strategy": row} for row in rows)) for rows in TREES},
    "one microbatch": each(replace(GPT, mesh=FOUR), *({"strategy": row} for row in TABLE)),
    **{f"one microbatch, {mesh}": each(replace(job, clip=None), {"mesh": mesh, "strategy": "ddp"}, *({"mesh": m, "strategy": row, "schedule": order} for m in (BOTH, "pipe=3 shard=2") for row, order in zip(TABLE, [*ORDERS] * 2, strict=False))) for job, mesh in ((CHAIN, "shard=2"), (DECODER, "pipe=4 shard=2"))},
    "no order changes a bit": each(replace(UNCLIPPED, microbatches=6), {"mesh": "shard=1"}, *({"schedule": order, "mesh": mesh} for order, mesh in product(ORDERS, PIPES))),
    "the default is 1f1b": each(replace(CHAIN, mesh="pipe=3", microbatches=4), {}, {"schedule": "1f1b"}),
    "prefetch": each(replace(GPT, mesh=FOUR, strategy="zero3", microbatches=3), {}, *({"prefetch": n} for n in AHEAD)),
    "prefetch of stages": each(replace(DECODER, mesh=BOTH, schedule="interleaved", strategy="zero3", microbatches=3), {}, *({"prefetch": n} for n in AHEAD)),
    "prefetch over a tensor axis": each(replace(HEADS, mesh="shard=2 tensor=2", strategy="zero3", sequence_parallel=True, microbatches=3), {}, *({"prefetch": n} for n in AHEAD)),
    "recomputed": each(replace(GPT, steps=2, mesh="shard=2", strategy="zero3", microbatches=3), {}, {"recompute": "full"}, {"recompute": "selective"}),
    **{f"recomputed, {mesh}": each(replace(HEADS, mesh=mesh, schedule=order, sequence_parallel=cut, microbatches=3), {}, {"recompute": "full"}, {"recompute": "selective"}) for mesh, order, cut in (("tensor=3", None, False), ("shard=2 tensor=2", None, True), ("pipe=2 tensor=2", "zb_h1", True))},
}  # fmt: skip


@pytest.mark.parametrize("group", ONE_RUN)
def test_layouts_that_are_one_run(group: str) -> None:
    first, *others = ONE_RUN[group]
    ranks = ranks_of(first)
    for config in others:
        assert same(ranks, ranks_of(config)), name_of(config)


@pytest.mark.parametrize("config", [
    replace(MLP, steps=2, mesh="shard=4", strategy="zero3", microbatches=3),
    replace(DECODER, mesh=BOTH, schedule="zbv", microbatches=4),
    replace(HEADS, mesh="shard=2 tensor=2", strategy="zero3", sequence_parallel=True, dtype="fp32"),
])  # fmt: skip
def test_the_same_layout_twice_is_the_same_run(config: VerifyConfig) -> None:
    first, again = record(config), record(config)
    assert same(first, again)
    for ours, theirs in zip(first, again, strict=True):
        assert ours.norms == theirs.norms
        for left, right in zip(ours.gradients, theirs.gradients, strict=True):
            assert left.keys() == right.keys() and all(torch.equal(left[piece], right[piece]) for piece in left)


def test_other_trees_round_differently() -> None:
    """Otherwise the replay of the layout's own tree would prove nothing."""
    assert all(len({additions(find_strategy(row)) for row in rows}) == 1 for rows in TREES)
    one, other = (ranks_of(MLP, steps=2, mesh=FOUR, strategy=row, microbatches=3) for row in ("ddp", "zero3"))
    assert not same(one, other)


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_agree_to_the_bit_on_everything_whole(sequence: bool) -> None:
    layout = {"strategy": "ddp", "sequence_parallel": sequence, "microbatches": 3 if sequence else 1}
    first, *others = ranks_of(HEADS, mesh="tensor=3", **layout)
    for record_ in others:
        assert record_.losses == first.losses
        assert [step.losses for step in record_.steps] == [step.losses for step in first.steps]
        assert all(torch.equal(record_.parameters[n], first.parameters[n]) for n in record_.parameters)
        for ours, theirs in zip(record_.gradients, first.gradients, strict=True):
            whole = [piece for piece in ours if piece[0] not in record_.cuts]
            assert whole and all(torch.equal(ours[piece], theirs[piece]) for piece in whole)


# ---- mixed precision ----------------------------------------------------------------------------------------------

MIXED = replace(DECODER, layers=3, dropout=0.2, strategy="zero3")


def test_a_loss_scale_that_is_too_large_is_left_out_in_both() -> None:
    """The layout and the process leave out the same steps; if no step was made nothing is proved."""
    config = replace(MIXED, dtype="fp16-mixed", clip=None)
    result = verify(config, mesh=FOUR, loss_scale=2.0**26, steps=12)
    assert result.verdict.word == "bitwise", result.different()
    assert 0 < result.verdict.left_out < 12 and result.ranks[0].made[-1]
    nothing = verify(config, mesh=FOUR, loss_scale=2.0**40)
    assert nothing.verdict.none_made and nothing.verdict.word == "different"


def test_bf16_with_fp32_masters_follows_fp32() -> None:
    """30 steps of a decoder: losses within 1 % of fp32's, which is what bf16's 8 bits of mantissa leave."""
    config = replace(MIXED, steps=30, dropout=0.0, clip=1.0, lr=1e-3)
    exact, mixed = (ranks_of(config, mesh="shard=2", dtype=dtype)[0].losses for dtype in ("fp32", "bf16-mixed"))
    assert exact[-1] < 0.9 * exact[0], "it learns"
    assert max(abs(m / e - 1) for m, e in zip(mixed, exact, strict=True)) < 0.01


@pytest.mark.parametrize(("mesh", "dtype"), [("pipe=2", "fp32"), ("shard=2", "bf16-mixed"), (BOTH, "bf16-mixed")])
def test_a_frozen_weight_of_two_stages_and_of_few_bits(mesh: str, dtype: Any) -> None:
    """It is rounded like all others, it has no master weights, and no use of it gets a gradient."""
    config = replace(MIXED, mesh=mesh, dtype=dtype, strategy="ddp", microbatches=2)
    whole = make_job(config.task, config.dtypes)

    def build() -> nn.Module:
        model = whole.build()
        model.get_submodule("embed").weight.requires_grad_(False)
        return model

    job = replace(whole, build=build)
    ranks = record(config, job)
    verdict = judge(job, config, ranks, *references(job, config, ranks))
    assert verdict.bitwise, [f.name for f in verdict.tree if not f.bitwise]
