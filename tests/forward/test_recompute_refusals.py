"""Models that recomputation would change are refused, at or before the first forward."""

from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank
from engine_cases import WIDTH, batches, distinct, train
from recompute_cases import Attends, Drops, Recurrent, bits, model_of, unchanged
from torch import Tensor, nn

from plait import anymodel
from plait.comm import Comm
from plait.forward.recompute import same_bits
from plait.run.models.hf import HFConfig, build
from plait.step import Engine, empty_parameters


def refused(template: nn.Module, words: str, recompute: Any = "full", row: str = "zero3", **settings: Any) -> None:
    with pytest.raises(ValueError, match=words):
        train(template, "shard=2", row, batches(1), recompute=recompute, **settings)


class Counter(cases.Block):
    """Writes to a buffer: in place, or a new tensor in its stead."""

    seen: Tensor

    def __init__(self, *, anew: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.anew = anew

    def forward(self, x_BC: Tensor) -> Tensor:
        if self.anew:
            self.seen = self.seen + 1
        else:
            self.seen += 1
        return super().forward(x_BC)


def test_a_block_that_writes_to_its_buffers_is_refused() -> None:
    for block, name in (
        (Counter(anew=False), "buffer 'seen'"),
        (Counter(anew=True), "buffer 'seen'"),
        (holding(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), "buffer 'inner.1.running_mean'"),
    ):
        for row in ("ddp", "zero3"):
            refused(model_of(cases.Block(), block), f"block 'blocks.1' writes to its {name} in forward", row=row)


def holding(*inner: nn.Module) -> nn.Module:
    return cases.Made(lambda m, x: m.inner(x), inner=nn.Sequential(*inner))


def test_running_statistics_that_are_only_read_are_not_refused() -> None:
    """In eval mode; a block's mode may change from step to step."""
    model = model_of(holding(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))).eval()
    unchanged(model)


def test_a_generator_of_ones_own_is_refused() -> None:
    class Noisy(cases.Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x_BC: Tensor) -> Tensor:
            noise = torch.randn(x_BC.shape, generator=self.generator, dtype=x_BC.dtype)
            return super().forward(x_BC + noise)

    refused(model_of(Noisy()), "'blocks.0' draws from its own generator")
    train(model_of(Noisy()), "shard=2", "zero3", batches(1))


def test_torchs_own_generator_is_restored_where_nothing_serves_it() -> None:
    """A model in eval mode draws no dropout; what its code draws is torch's."""

    class Random(cases.Block):
        def forward(self, x_BC: Tensor) -> Tensor:
            return super().forward(x_BC * torch.rand(x_BC.shape, dtype=x_BC.dtype))

    found = []
    for mode in ("full", None):
        torch.manual_seed(5)
        model = model_of(Random(), Random()).eval()
        found.append(train(model, "shard=1", "ddp", batches(), recompute=mode))
    bits(*found)


def test_a_block_that_runs_more_than_once_and_draws_is_refused() -> None:
    refused(model_of(Drops(), kind=Recurrent), "ran several times in this forward and draws dropout")
    unchanged(model_of(Attends(), kind=Recurrent), recompute="selective")  # which call it is, is known there


def test_what_cannot_be_recomputed_is_refused() -> None:
    refused(model_of(Inner(), Inner()), "block 'blocks.0' calls torch.func.grad or its like")
    refused(model_of(cases.Block()), "recompute='half': it is 'full' or 'selective'", "half")
    refused(model_of(cases.Block()), "runs F.scaled_dot_product_attention again, which Net does not call", "selective")
    refused(model_of(), "no stock layer alone.*no other unit there")
    refused(model_of(Drops()), "no stock layer alone.*no other unit there", units=["first", "head"])
    refused(distinct(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 3))), "no stock layer alone.*no other unit there")


@each_rank("tensor=2", refused=r"'model\.layers\.0\.self_attn' is 'enter' in the tensor plan")
def test_a_unit_whose_stream_is_gathered_before_its_forward_is_refused(comm: Comm) -> None:
    """Its recomputation would begin after the message."""
    sizes = HFConfig(vocabulary=11, num_layers=1, width=8, num_heads=2, num_kv_heads=2, max_length=7)
    with empty_parameters():
        model = build(sizes)
    units = ["model.layers.0.self_attn", "model.layers.0.mlp"]
    plan = anymodel.plan_of(model, sequence=True)
    Engine(model, comm, units=units, recompute="full", sequence_parallel=True, tensor_plan=plan)


def test_a_buffer_of_nan_that_nobody_writes_is_the_same_buffer() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert same_bits(nan, nan.clone()) and not same_bits(nan, torch.tensor([1.0, 0.0]))
    infinite = torch.tensor([float("inf")])
    assert same_bits(infinite, infinite.clone()) and not same_bits(infinite, infinite.nan_to_num())
    assert same_bits(torch.tensor([True]), torch.tensor([True])) and not same_bits(torch.zeros(2), torch.zeros(3))


class Inner(cases.Block):
    """Takes a gradient by torch.func."""

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + torch.func.grad(lambda x: super(Inner, self).forward(x).sum())(x_BC)


class Caching(cases.Block):
    """Adds to a cache, as decoders do: it is longer the second time."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        self.joined = joined

    def forward(self, x_BC: Tensor) -> Tensor:
        self.rows.append(x_BC)
        every = torch.stack(self.rows)
        return super().forward((every * every.detach()).sum(0) if self.joined else every.view(x_BC.shape))


@pytest.mark.parametrize(("joined", "words"), [(True, "made other tensors"), (False, "fails when it is run again")])
def test_what_a_block_wrote_to_is_said_to_stay_written(joined: bool, words: str) -> None:
    refused(
        model_of(Caching(joined)), rf"a forward .*{words}.*: what it has written to stays written .*use_cache = False"
    )


class Added(cases.Net):
    """Adds to the stream in place, which the blocks are given by keyword or in a list."""

    def __init__(self, listed: bool) -> None:
        super().__init__(0)
        self.listed = listed
        self.blocks = nn.ModuleList([starts(), starts()])

    def through(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC += block([x_BC]) if self.listed else block(x_BC=x_BC)
        return x_BC


def starts() -> nn.Module:
    """Begins with what keeps its output, so that plain autograd has no need of the input."""
    run = lambda m, x_BC: m.inner((x_BC[0] if isinstance(x_BC, list) else x_BC).tanh())  # noqa: E731
    return cases.Made(run, inner=nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("listed", [False, True])
def test_an_argument_that_is_written_to_behind_a_block_is_refused(listed: bool) -> None:
    """Without a word the block would run again on what it holds now."""
    model = distinct(Added(listed))
    cases.agree(train(model, "shard=2", "zero3", batches(1)), cases.plain(model, batches(1)))
    refused(model, r"written to after its forward.*not x \+= block\(x\).*DoubleTensor \[[67], 5\]")
