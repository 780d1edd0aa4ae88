"""Batches for stock loaders: every sample once, no rank without one, and the batches of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

import plait
from plait.comm import Comm
from plait.run.data.rank_batches import RankBatches
from plait.table.mesh import Mesh


def dealt(size: int, batch_size: int, mesh: Mesh, **settings: Any) -> list[list[list[int]]]:
    return [list(RankBatches(size, batch_size, mesh, rank, **settings)) for rank in range(mesh.size)]


def test_the_picture_of_the_docstring() -> None:
    assert dealt(10, 4, Mesh(shard=2)) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    assert dealt(9, 4, Mesh(shard=2)) == [[[0, 1], [4, 5, 6]], [[2, 3], [7, 8]]]
    assert dealt(9, 4, Mesh(shard=2), drop_last=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_every_sample_once_and_no_rank_without_a_batch(
    size: int, batch_size: int, ranks: int, shuffle: bool, epoch: int
) -> None:
    if batch_size < ranks or size < ranks:
        with pytest.raises(ValueError, match="each rank needs a sample of each batch"):
            RankBatches(size, batch_size, Mesh(shard=ranks), 0)
        return
    made = [RankBatches(size, batch_size, Mesh(shard=ranks), rank, shuffle=shuffle, seed=5) for rank in range(ranks)]
    for sampler in made:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in made]
    assert {len(own) for own in batches} == {len(made[0])}
    assert sorted(index for own in batches for batch in own for index in batch) == list(range(size))
    assert all(batch for own in batches for batch in own)
    together = [[i for own in batches for i in own[number]] for number in range(len(made[0]))]
    alone = DistributedSampler(range(size), 1, 0, shuffle=shuffle, seed=5)  # type: ignore[arg-type]
    alone.set_epoch(epoch)
    assert [i for batch in together for i in batch] == list(alone)
    for own, sampler in zip(batches, made, strict=True):  # a run goes on in the middle of an epoch
        sampler.set_epoch(epoch, start=len(own) // 2)
        assert list(sampler) == own[len(own) // 2 :] and len(sampler) == len(own) - len(own) // 2
    with pytest.raises(ValueError, match="an epoch has"):
        made[0].set_epoch(epoch, start=len(batches[0]) + 1)


def test_ranks_of_a_pipeline_and_of_a_tensor_group_have_the_same() -> None:
    batches = dealt(7, 4, Mesh(pipe=2, replica=2, tensor=2), shuffle=True)
    assert batches[0] == batches[1] == batches[4] == batches[5] != batches[2] == batches[3] == batches[6] == batches[7]


def test_a_stock_loader_takes_either() -> None:
    data = [torch.tensor(float(number)) for number in range(9)]

    def body(comm: Comm) -> Any:
        exact = DataLoader(data, batch_sampler=plait.rank_batches(data, 4, comm, seed=3))  # type: ignore[arg-type]
        padded = plait.distributed_sampler(data, comm, seed=3, drop_last=False)
        stock = DataLoader(data, batch_size=2, sampler=padded)  # type: ignore[arg-type]
        return [batch.tolist() for batch in exact], [batch.tolist() for batch in stock]

    exact, stock = zip(*plait.run_threads("shard=2", body), strict=True)
    assert sorted(x for rank in exact for batch in rank for x in batch) == list(range(9))
    assert sum(len(batch) for rank in stock for batch in rank) == 10  # one counts twice: it was asked for


def test_samples_that_would_count_twice_are_named() -> None:
    def body(comm: Comm) -> None:
        plait.distributed_sampler(range(10), comm)

    with pytest.raises(ValueError, match=r"10 samples do not divide among 4 data ranks: .* out 2 .* lets 2 count"):
        plait.run_threads("replica=2 shard=2 tensor=1", body)
