"""Dropout on cut activations: places of a slice, and sites of a user's own; test_tensor_parallel.py has all styles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import Made, batches, distinct, sgd, train
from pipeline_cases import engine_on, step
from tensor_models import WIDTH, Model, alone, model, same_run, token_batches
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.forward.context import RNGPosition
from plait.forward.dropout import DropoutRNG
from plait.forward.masks import Slice, keep_mask, stream_bits
from plait.step import Engine

CPU = torch.device("cpu")


def _sum(net: nn.Module, tokens: Tensor) -> Any:
    return net(tokens).square().sum()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_indices_of_a_slice_are_those_within_the_whole(dim: int) -> None:
    whole = torch.arange(5 * 7 * 3).view(5, 7, 3)
    size = whole.size(dim)
    for start in range(size):
        for stop in range(start, size + 1):
            local = whole.narrow(dim, start, stop - start)
            place = Slice(dim, start, size).indices(local.shape)
            assert torch.equal(place(torch.arange(local.numel())), local.reshape(-1))


@pytest.mark.parametrize(("keys", "numel"), [([7, 2**63, 2**64 - 1], 35), ([5, 2**40], 66_000), ([], 5), ([9], 0)])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 1.0])
@pytest.mark.parametrize("place", [None, lambda index: index * 3 + 2**31])
def test_numpy_makes_the_masks_of_torch(keys: list[int], numel: int, p: float, place: Any) -> None:
    expected = stream_bits(keys, numel, CPU, place) >= int(p * 2**32)
    assert torch.equal(keep_mask(keys, numel, p, CPU, place), expected)


def test_flattened_tokens_under_sequence_parallelism_are_refused() -> None:
    def body(comm: Comm) -> None:
        engine = Engine(model(), comm, strategy="ddp", sequence_parallel=True, loss_fn=_sum, count_fn=len)
        stage = engine.placed.stages[0]
        dropout = stage.interceptor.handlers[-1]
        assert isinstance(dropout, DropoutRNG) and dropout.slice_of is not None
        stage.current.replace(length=7, position=RNGPosition(0, 0, 0, 2, (7,)))
        start, stop = stage.axis.part(7)
        assert dropout.slice_of("blocks.0.dropout", (2, stop - start, WIDTH)) == Slice(1, start, 7)
        with pytest.raises(ValueError, match="draw before dims are flattened"):
            dropout.slice_of("blocks.0.dropout", (2 * (stop - start), WIDTH))

    plait.run_threads("tensor=2", body)


PLAN = {"pair.up": "column", "pair.down": "row"}


def net(hidden: int = 6, between: Any = nn.Identity(), after: Any = nn.Identity()) -> nn.Module:  # noqa: B008
    """A linear, then up, ``between``, down, ``after``, then a linear."""
    ends = {"up": nn.Linear(WIDTH, hidden), "down": nn.Linear(hidden, WIDTH)}
    pair = Made(lambda m, x: m.after(m.down(m.between(torch.tanh(m.up(x))))), **ends, between=between, after=after)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    return distinct(Made(lambda m, x: m.last(m.pair(m.first(x))), first=first, pair=pair, last=last))


def drop(x: Tensor) -> Tensor:
    """On the stream, in the module that holds the columns."""
    return F.dropout(x, 0.4)


def equal(template: nn.Module, ways: int = 2, **more: str) -> None:
    data = batches()
    ranks = train(template, f"tensor={ways}", "ddp", data, sgd, tensor_plan={**PLAN, **more})
    same_run(ranks, alone(template, data))


@pytest.mark.parametrize("site", ["pair.between", "pair.between.0", "pair.between.0.0"])
def test_dropout_between_a_column_and_a_row_that_the_plan_does_not_name_is_refused(site: str) -> None:
    inside: nn.Module = nn.Dropout(0.4)
    for _ in range(site.count(".") - 1):
        inside = nn.Sequential(inside)
    with pytest.raises(ValueError, match=f"module '{site}' draws dropout between cut products"):
        equal(net(between=inside))
    equal(net(between=inside), **{site: "hidden"})


@pytest.mark.parametrize("hidden", [2 * WIDTH, 3 * WIDTH, 7])
def test_dropout_after_the_row_is_on_the_whole_stream(hidden: int) -> None:
    """Where a rank's part of the hidden features is as wide as the stream, it must not be taken for it."""
    equal(net(hidden, after=nn.Dropout(0.4)), 2)
    equal(net(hidden, after=drop), 2)
    equal(net(hidden, after=drop), 3)


def test_a_style_that_does_not_fit_the_activation_is_refused() -> None:
    doubled = Made(lambda m, x: m.drop(torch.cat((x, x), -1))[..., : x.size(-1)], drop=nn.Dropout(0.4))
    with pytest.raises(ValueError, match="whose last dim is no part of the 6 features"):
        equal(net(between=doubled), **{"pair.between.drop": "hidden"})


@pytest.mark.parametrize("missing", ["dropout", "blocks.*.dropout"])
def test_a_stream_cut_in_time_never_gets_another_mask(missing: str) -> None:
    """Dropout on it that the plan does not name is refused, or served all the same."""
    plan = {name: style for name, style in Model().tensor_plan().items() if name != missing}
    data = token_batches()
    same_run(train(model(), "tensor=2", "ddp", data, sgd, tensor_plan=plan), alone(model(), data))
    try:
        ranks = train(model(), "tensor=2", "ddp", data, sgd, tensor_plan=plan, sequence_parallel=True)
    except ValueError as refused:
        assert "draws dropout" in str(refused) and "sequence" in str(refused)
    else:
        same_run(ranks, alone(model(), data))


@pytest.mark.parametrize("mesh", ["shard=2", "tensor=2"])
@pytest.mark.parametrize("by", ["hook", "forward"])
def test_dropout_that_a_user_adds_to_a_layer_has_one_site_on_every_mesh(by: str, mesh: str) -> None:
    """Layers that draw nothing are not followed unless asked for; these do draw."""

    def added(layer: nn.Linear) -> None:
        own = layer.forward
        if by == "hook":
            layer.register_forward_hook(lambda module, args, out: F.dropout(out, 0.4, module.training))
        else:
            layer.forward = lambda x: F.dropout(own(x), 0.4, layer.training)

    def built() -> nn.Module:
        net = model(0.0)
        for mlp in (block.mlp for block in net.blocks):
            added(mlp.down)
        return net

    data = token_batches()

    def losses(mesh: str) -> list[float]:
        def body(comm: Comm) -> list[float]:
            engine = engine_on(built(), comm, optimizer=sgd)
            return [step(engine, batch, 1).loss for batch in data]

        return plait.run_threads(mesh, body)[0]

    assert losses(mesh) == pytest.approx(losses("shard=1"), rel=1e-12)
    dry = model(0.0)
    assert losses("shard=1") != pytest.approx(alone(dry, data).losses, rel=1e-3)
