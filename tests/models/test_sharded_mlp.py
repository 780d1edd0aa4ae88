"""Slices are the monolith: its names, its weights, its masks, and its run when ranks send tensors to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plait_lessons.naive.hand_off import receive
from plait_lessons.naive.microbatcher import Pair, accumulate, split
from plait_lessons.script import init
from torch import Tensor, nn

from plait.comm import Comm, run
from plait.forward.context import CurrentForward, RNGPosition
from plait.forward.dropout import DropoutRNG
from plait.forward.interceptor import Interceptor
from plait.run.data import SyntheticRegression
from plait.run.models.mlp import MLP, MLPConfig, sample_count, squared_error_sum
from plait.run.models.sharded_mlp import ShardedMLP
from plait.step import empty_parameters
from plait.table.mesh import Mesh
from plait.zero.state.init import materialise

WIDTHS = (5, 7, 3, 9, 4, 6, 11, 5, 3, 8, 2, 7, 7, 4, 9, 6, 3)
ODD = MLPConfig(widths=WIDTHS, dropout=0.3)
CPU = torch.device("cpu")
SEED = 11


def monolith(config: MLPConfig = ODD) -> MLP:
    with empty_parameters():
        model = MLP(config)
    materialise(model, SEED, CPU)
    return model


def piece(stage: int, num_stages: int, config: MLPConfig = ODD) -> ShardedMLP:
    model = ShardedMLP(config, stage, num_stages)
    materialise(model, SEED, CPU)
    return model


@pytest.mark.parametrize("num_stages", range(1, 17))
def test_slices_are_the_monolith_to_the_bit(num_stages: int) -> None:
    whole = monolith()
    found: dict[str, Tensor] = {}
    x = torch.randn(6, 5)
    whole.eval()
    expected = whole(x)
    for stage in range(num_stages):
        model = piece(stage, num_stages).eval()
        assert not found.keys() & model.state_dict().keys()
        assert (x.size(1), model.fan_in, model.fan_out) == (model.fan_in, WIDTHS[model.layers[0]], model(x).size(1))
        assert [type(child) for child in model] == [type(whole[i]) for i in model.layers]
        found |= model.state_dict()
        x = model(x)
    assert list(found) == list(whole.state_dict())
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    assert torch.equal(x, expected)


def test_layers_go_to_the_first_stages() -> None:
    assert [list(ShardedMLP(ODD, stage, 5).layers) for stage in range(5)] == [
        [0, 1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
        [10, 11, 12],
        [13, 14, 15],
    ]
    assert list(ShardedMLP(ODD, 1, 5).state_dict())[:2] == ["4.linear.weight", "4.linear.bias"]
    assert isinstance(ShardedMLP(ODD, 4, 5)[-1].activation, nn.Identity)


def test_a_slice_takes_no_memory_and_draws_nothing_before_its_values_come() -> None:
    before = torch.get_rng_state()
    model = ShardedMLP(MLPConfig(), 3, 4)
    assert all(p.is_meta for p in model.parameters())
    materialise(model, SEED, CPU)
    assert not any(p.is_meta for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(p.numel() for p in model.parameters()) == 4 * 65 * 64


@pytest.mark.parametrize(
    ("stage", "num_stages", "words"),
    [
        (0, 17, "17 stages, .* 16 links .*at most 16"),
        (4, 4, "stage 4 of 4: stages go from 0 to 3"),
        (-1, 4, "stage -1 of 4"),
        (0, 0, "0 stages"),
    ],
)
def test_a_stage_that_cannot_be_is_named(stage: int, num_stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ShardedMLP(ODD, stage, num_stages)


# ---- ranks that send tensors ------------------------------------------------------------------------------


def pairs(num_microbatches: int, samples: int = 11) -> list[Pair]:
    batch: dict[str, Any] = SyntheticRegression(5, seed=0, output_width=3).samples(0, 0, samples, samples)
    microbatches: list[Pair] = split((batch.pop("x"), batch), num_microbatches)
    return microbatches


def attached(model: nn.Module) -> CurrentForward:
    current = CurrentForward()
    Interceptor(current, [DropoutRNG(SEED, current)]).follow(model)
    return current


def draws(microbatches: list[Pair]) -> list[RNGPosition]:
    sizes = [len(x) for x, _ in microbatches]
    return [RNGPosition(0, m, sum(sizes[:m]), size) for m, size in enumerate(sizes)]


def in_turn(comm: Comm, microbatches: list[Pair]) -> tuple[dict[str, Tensor], list[float]]:
    """One microbatch after the other through all ranks and back; this rank's gradients, and the last one's losses."""
    world = init(comm)
    before, after = world.get_prev_rank(), world.get_next_rank()
    model = piece(world.rank, world.world_size)
    current, total, losses = attached(model), sum(sample_count(target) for _, target in microbatches), []
    for (x, target), draw in zip(microbatches, draws(microbatches), strict=True):
        current.begin(draw)
        if before is not None:
            x = receive(world.recv_tensor((len(x), model.fan_in), before))
        y = model(x)
        if after is None:
            y = squared_error_sum(y, target)
            losses.append(y.item())
            gradient = torch.full_like(y, 1 / total)
        else:
            world.send_tensor(y, after)
            gradient = world.recv_tensor(y.shape, after)
        y.backward(gradient)
        if before is not None:
            assert x.grad is not None
            world.send_tensor(x.grad, before)
    world.close()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, losses


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 3), (2, 1), (2, 8), (3, 2), (4, 4), (5, 3), (5, 8), (16, 2)]
)
def test_ranks_that_send_tensors_are_the_monolith_to_the_bit(num_stages: int, num_microbatches: int) -> None:
    microbatches = pairs(num_microbatches)
    whole = monolith()
    current, coming = attached(whole), iter(draws(microbatches))
    whole.register_forward_pre_hook(lambda *_: current.begin(next(coming)), prepend=True)
    losses = [loss.item() for loss in accumulate(whole, microbatches, squared_error_sum, sample_count)]

    ranks = run(Mesh(pipe=num_stages), lambda comm: in_turn(comm, microbatches))
    assert [found for _, found in ranks] == [[]] * (num_stages - 1) + [losses]
    gradients = {name: gradient for found, _ in ranks for name, gradient in found.items()}
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for name, p in whole.named_parameters():
        assert p.grad is not None and torch.equal(gradients[name], p.grad), name


def test_these_runs_have_masks_and_ragged_microbatches() -> None:
    assert [sample_count(target) for _, target in pairs(4)] == [2, 3, 3, 0]
    microbatches = pairs(1)
    model = monolith()
    current = attached(model)
    current.begin(draws(microbatches)[0])
    dropped = model(microbatches[0][0])
    assert not torch.equal(dropped, model.eval()(microbatches[0][0]))
