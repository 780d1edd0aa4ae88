"""Published faults of context parallelism, each put into plait's own axis; docs/silent-bugs.md has their threads."""

# ruff: noqa: E501 (a row is a line)
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import field_faults
import pytest
import torch
from planted import Patch, Put, instead
from published import Fault, check
from torch import Tensor
from verify_cases import found_in

import plait
from plait.run.config.settings import VerifyConfig
from plait.run.models.gpt import GPT, IGNORED, GPTConfig, loss_sum, token_count
from plait.step import Engine
from plait.tensor import ring_attention
from plait.tensor.ring_attention import RingAttention
from plait.tensor.time_axis import StepsOfTime, TimeAxis, _Gather

SAMPLES, LENGTH = 6, 12
SIZES = GPTConfig(vocabulary=37, num_layers=2, width=24, num_heads=6, num_kv_heads=2, hidden=20, max_length=LENGTH)


def packed(step: int) -> dict[str, Tensor]:
    """Rows of several documents; targets are ragged, more of them late in a row."""
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZES.vocabulary, (SAMPLES, LENGTH + 1), generator=numbers)
    counted = torch.rand(SAMPLES, LENGTH, generator=numbers) < torch.linspace(0.3, 1.2, LENGTH)
    documents = (torch.rand(SAMPLES, LENGTH, generator=numbers) < 0.2).long().cumsum(1)
    targets = tokens[:, 1:].masked_fill(~counted, IGNORED)
    return {"tokens": tokens[:, :-1].clone(), "targets": targets, "documents": documents}


def unpacked(step: int) -> dict[str, Tensor]:
    return {name: value for name, value in packed(step).items() if name != "documents"}


def loud() -> GPT:
    """A decoder whose scores are in the hundreds."""
    model = GPT(replace(SIZES, dropout=0.0))
    for block in model.blocks:
        block.attention.query.weight.data.mul_(4000.0)
    return model


PACKED = VerifyConfig(
    job=plait.UserJob(lambda: GPT(SIZES), loss_sum, packed, token_count), mesh="shard=2 context=2", strategy="zero1",
    dtype="fp64", batch=SAMPLES, steps=2, clip=0.3,
)  # fmt: skip
RING = replace(
    PACKED,
    job=plait.UserJob(lambda: GPT(replace(SIZES, dropout=0.0)), loss_sum, unpacked, token_count),
    ring_attention=True,
)
LOUD = replace(RING, dtype="fp32", job=plait.UserJob(loud, loss_sum, unpacked, token_count))


@instead(TimeAxis, "attention")
def documents_see_each_other(
    original: Any, self: TimeAxis, q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any
) -> Any:
    return original(self, q, k, v, None, **how)


@instead(TimeAxis, "places")
def positions_go_on_from_the_early_block(original: Any, self: TimeAxis, mine: int) -> Tensor:
    places: Tensor = original(self, mine)
    return places[0] + torch.arange(mine)


@instead(TimeAxis, "ordered")
def blocks_stay_in_the_order_of_ranks(original: Any, self: TimeAxis, by_rank: Tensor, dim: int) -> Tensor:
    return by_rank


@instead(StepsOfTime, "indices")
def masks_of_the_first_steps_on_every_rank(original: Any, self: StepsOfTime, shape: Any) -> Callable[[Tensor], Tensor]:
    return lambda index: index


@instead(TimeAxis, "cut_batch")
def targets_are_shifted_after_the_cut(original: Any, self: TimeAxis, batch: dict[str, Tensor]) -> Any:
    cut = original(self, batch)
    return cut | {"targets": torch.nn.functional.pad(cut["tokens"][:, 1:], (0, 1), value=IGNORED)}


@instead(Engine, "_functions")
def each_rank_divides_by_its_own_targets(original: Any, self: Engine) -> Any:
    loss_fn, count_fn = original(self)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Means of ranks are averaged: each part has the same weight, whatever its count."""
        whole, ranks = self._open.count, self.comm.mesh.context
        return _times(loss_fn(model, batch), whole / ranks / count_fn(batch))

    return loss, count_fn


def scaled(times: float) -> Put:
    def functions(original: Any, self: Engine) -> Any:
        loss_fn, count_fn = original(self)
        return (lambda model, batch: _times(loss_fn(model, batch), times)), count_fn

    return instead(Engine, "_functions")(functions)


def _times(loss: Tensor, times: float) -> Tensor:
    """The same number, with a gradient that is ``times`` as large."""
    return loss.detach() + times * (loss - loss.detach())


def keys_get_the_gradient_of_their_own_rank(patch: Patch) -> None:
    def backward(ctx: Any, gradient: Tensor) -> Any:
        axis = ctx.axis
        mine = axis.by_rank(gradient.movedim(ctx.dim, 0), 0).chunk(axis.ways)[axis.index]
        return mine.movedim(0, ctx.dim), None, None

    patch.setattr(_Gather, "backward", staticmethod(backward))


def the_ring_goes_back_without_a_mask(patch: Patch) -> None:
    behind = threading.local()

    def backward(original: Any, ctx: Any, gradient: Tensor) -> Any:
        behind.now = True
        try:
            return original(ctx, gradient)
        finally:
            behind.now = False

    def scores(original: Any, q: Tensor, block: Tensor, turn: int, groups: int) -> Any:
        return original(q, block, turn + getattr(behind, "now", False), groups)

    instead(RingAttention, "backward")(backward)(patch)
    instead(ring_attention, "_scores")(scores)(patch)


def exponentials_are_added(patch: Patch) -> None:
    patch.setattr(torch, "logaddexp", lambda a, b: (a.exp() + b.exp()).log())


MIXED, KEYS = "blocks.0.attention.output", "blocks.1.attention.value"
COMPUTED = "it computes something else (another mask or position"
TWICE = replace(PACKED, lr_schedule="linear", warmup=1, steps=3)
FAULTS = [
    Fault(documents_see_each_other, PACKED, "TRL #6843, Axolotl #3608", "forward", MIXED, COMPUTED),
    Fault(positions_go_on_from_the_early_block, PACKED, "verl #6267", "forward", MIXED, "on rank 0 of 2, microbatch 0: only indices 3 to 5 of 6 of dim 1"),
    Fault(blocks_stay_in_the_order_of_ranks, PACKED, "slime #73", "forward", MIXED, "on all 2 ranks, microbatch 0: only indices 3 to 5 of 6 of dim 1"),
    Fault(masks_of_the_first_steps_on_every_rank, PACKED, "Megatron-LM #4828", "forward", "embed.dropout", COMPUTED),
    Fault(targets_are_shifted_after_the_cut, PACKED, "transformers #36607, bionemo-recipes #1449", "", "", "in the whole microbatches and 60 in what context=2 has cut them into"),
    Fault(each_rank_divides_by_its_own_targets, PACKED, "prime-rl #1960", "backward", "head", "count 1.074 times on rank 0 and 0.9355 times on rank 1"),
    Fault(scaled(2.0), PACKED, "DeepSpeed #5248", "backward", "head", "every part counts 2 times"),
    Fault(scaled(0.5), PACKED, "VeOmni #338", "backward", "head", "every part counts 1/2 times"),
    Fault(keys_get_the_gradient_of_their_own_rank, PACKED, "pytorch/xla #5784", "backward", KEYS, "still right: what one microbatch adds to the gradient of 'blocks.1.attention.output.weight'"),
    Fault(the_ring_goes_back_without_a_mask, RING, "Megatron-LM #1464", "backward", KEYS, "still right: what one microbatch adds to the gradient of 'blocks.1.attention.output.weight'"),
    Fault(exponentials_are_added, LOUD, "TransformerEngine #716", "", "", "step 0 (counted from 0) is not finite: the loss of microbatch 0 on rank 0"),
    Fault(field_faults.step_the_schedule_twice, TWICE, "ArcticTraining #199", "update", "norm.weight", "the optimizer made something else of the right gradient", 1),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.threads for fault in FAULTS])
def test_a_published_fault_is_named_and_placed(fault: Fault) -> None:
    check(fault)


@pytest.mark.parametrize("config", [PACKED, RING], ids=["packed", "ring"])
def test_without_a_fault_nothing_is_found(config: VerifyConfig) -> None:
    found, first = found_in(config)
    assert found.verdict.word == "equal" and first is None
