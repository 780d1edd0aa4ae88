"""The global norm under a tensor axis counts every element once; and whole parameters are seen to be whole."""

from __future__ import annotations

import math

import pytest
from engine_cases import batches, net, sgd, train
from tensor_models import alone, model, same_run, token_batches
from torch import Tensor

from plait.step import Engine

PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3", "hsdp", "psdp"])
@pytest.mark.parametrize("mesh", ["tensor=3", "tensor=4", "shard=2 tensor=3", "replica=2 shard=2 tensor=2"])
def test_the_norm_is_the_single_processs_whatever_is_cut_and_whatever_is_whole(mesh: str, row: str) -> None:
    """11 features in the blocks are cut in 4, 4, 3; norms, biases, first and head lie whole on every rank."""
    data = batches()
    ranks = train(net(), mesh, row, data, sgd, tensor_plan=PLAN, clip=0.1)
    single = alone(net(), data, clip=0.1)
    assert min(norm for norm in single.norms if norm is not None) > 0.1
    same_run(ranks, single)


@pytest.mark.parametrize("sequence", [False, True])
def test_summed_parameters_are_counted_once_too(sequence: bool) -> None:
    data = token_batches()
    ranks = train(model(), "shard=2 tensor=2", "zero2", data, sgd, sequence_parallel=sequence, clip=math.inf)
    same_run(ranks, alone(model(), data, clip=math.inf))


@pytest.mark.parametrize("mesh", ["tensor=3", "shard=2 tensor=2", "replica=2 tensor=2"])
def test_what_the_ranks_count_together_is_every_element_once(mesh: str) -> None:
    def counted(engine: Engine) -> list[tuple[str, int]]:
        return [(o.name, o.run.numel) for o in engine.placed.owned if engine.placed.norm.counts(o)]

    for row in ("ddp", "zero1", "hsdp"):
        ranks = train(net(), mesh, row, batches(1), sgd, tensor_plan=PLAN, clip=1.0, look=counted)
        total: dict[str, int] = {}
        for run in ranks:
            for name, numel in run.seen:
                total[name] = total.get(name, 0) + numel
        sizes: dict[str, Tensor] = dict(net().named_parameters())
        assert total == {name: value.numel() for name, value in sizes.items()}
