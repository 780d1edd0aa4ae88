"""Batches of any kind are functions of their place in the run: any cut gives the same bits; stock loaders too."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plait
from plait.comm import Comm
from plait.forward.batch import batch_tensors
from plait.run.data.batches import IGNORED, Batches, split_samples
from plait.run.data.order import mix, scramble
from plait.run.data.rank_batches import RankBatches
from plait.run.data.regression import SyntheticRegression, scramble_tensor
from plait.run.data.windows import TextBatches
from plait.step.step import num_samples
from plait.table.mesh import Mesh

TEXT = bytes((i * i + i // 7) % 256 for i in range(1003))

SOURCES: dict[str, Batches] = {
    "text": TextBatches(TEXT, 10, seed=1),
    "ragged text": TextBatches(TEXT, 10, seed=1, ragged=True),
    "regression": SyntheticRegression(6, seed=1),
    "odd regression": SyntheticRegression(5, seed=1, ragged=False, dtype=torch.float64),
}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value), key


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


# -- the split -----------------------------------------------------------------------------------------------


@given(num_parts=st.integers(1, 50), more=st.integers(0, 200))
def test_every_split_is_whole_and_even_to_one(num_parts: int, more: int) -> None:
    parts = split_samples(num_parts + more, num_parts)
    assert len(parts) == num_parts
    assert [first + i for first, count in parts for i in range(count)] == list(range(num_parts + more))
    sizes = [count for _, count in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_what_cannot_fill_its_parts_is_named() -> None:
    with pytest.raises(ValueError, match=r"11 samples cannot fill 4 data ranks x 3 micro.*global_batch to 12"):
        SOURCES["text"].microbatches(0, 0, 4, 3, 11)


# -- purity, for every source --------------------------------------------------------------------------------


@every_source
@pytest.mark.parametrize("num_data_ranks, num_microbatches", [(1, 1), (1, 13), (2, 2), (3, 2), (4, 1), (13, 1)])
def test_any_cut_joins_to_the_same_global_batch(source: Batches, num_data_ranks: int, num_microbatches: int) -> None:
    for step in (0, 1, 40):
        whole = source.samples(step, 0, 13, 13)
        parts = [
            batch
            for data_rank in range(num_data_ranks)
            for batch in source.microbatches(step, data_rank, num_data_ranks, num_microbatches, 13)
        ]
        sizes = [len(next(iter(part.values()))) for part in parts]
        assert sizes == [count for _, count in split_samples(13, num_data_ranks * num_microbatches)]
        assert_same_bits(joined(parts), whole)


@every_source
@settings(max_examples=25, deadline=None)
@given(step=st.integers(0, 10**6), first=st.integers(0, 10), count=st.integers(0, 10), others=st.integers(0, 5))
def test_any_slice_is_the_slice_of_the_whole(source: Batches, step: int, first: int, count: int, others: int) -> None:
    global_batch = first + count + others
    whole = source.samples(step, 0, global_batch, global_batch)
    found = source.samples(step, first, count, global_batch)
    assert_same_bits(found, {key: value[first : first + count] for key, value in whole.items()})


@every_source
def test_asking_changes_nothing(source: Batches) -> None:
    state = torch.get_rng_state()
    before = source.samples(3, 0, 5, 5)
    source.samples(9, 2, 3, 5)
    next(iter(before.values())).zero_()  # a caller may write into what it was given
    source.microbatches(1, 0, 1, 2, 5)
    assert torch.equal(state, torch.get_rng_state())
    again = source.samples(3, 0, 5, 5)
    assert next(iter(again.values())).any()


@every_source
def test_steps_differ(source: Batches) -> None:
    first, second = (next(iter(source.samples(step, 0, 5, 5).values())) for step in (0, 1))
    assert not torch.equal(first, second)


# -- text ----------------------------------------------------------------------------------------------------


def test_samples_are_windows_and_targets_are_the_next_tokens() -> None:
    batch = SOURCES["text"].samples(2, 0, 20, 20)
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        assert tokens[1:] == targets[:-1]
        assert bytes([*tokens, targets[-1]]) in TEXT
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64


def test_an_epoch_sees_every_sample_once_and_the_next_in_another_order() -> None:
    source = TextBatches(TEXT, 10, seed=2)
    assert source.num_samples == 100
    assert TextBatches(TEXT[:1000], 10, seed=2).num_samples == 99  # the last target needs a token too
    epochs = [source.samples(step, 0, 100, 100)["tokens"] for step in (0, 1)]
    windows = [tuple(TEXT[i * 10 : i * 10 + 10]) for i in range(100)]
    for epoch in epochs:
        assert sorted(map(tuple, epoch.tolist())) == sorted(windows)
    assert not torch.equal(*epochs)


def test_the_run_is_one_row_of_samples_whatever_the_batch() -> None:
    """Steps of 6 and steps of 4 read the same 24 samples, over the edge of an epoch too."""
    source = TextBatches(TEXT[:75], 10, seed=2, ragged=True)
    assert source.num_samples == 7
    by_six = joined([source.samples(step, 0, 6, 6) for step in range(4)])
    assert_same_bits(joined([source.samples(step, 0, 4, 4) for step in range(6)]), by_six)


def test_ragged_masks_a_tail_and_leaves_a_target() -> None:
    plain, ragged = (SOURCES[name].samples(0, 0, 100, 100) for name in ("text", "ragged text"))
    assert torch.equal(plain["tokens"], ragged["tokens"])
    counts = []
    for full, cut in zip(plain["targets"], ragged["targets"], strict=True):
        count = int((cut != IGNORED).sum())
        assert torch.equal(cut[:count], full[:count]) and (cut[count:] == IGNORED).all()
        counts.append(count)
    assert set(counts) == set(range(1, 11))
    assert not (plain["targets"] == IGNORED).any()
    microbatches = [b for rank in (0, 1) for b in SOURCES["ragged text"].microbatches(0, rank, 2, 2, 8)]
    assert len({int((b["targets"] != IGNORED).sum()) for b in microbatches}) > 1, "token counts must differ"


def test_a_seed_is_another_order_and_other_lengths() -> None:
    one, two = (TextBatches(TEXT, 10, seed=seed, ragged=True).samples(0, 0, 50, 50) for seed in (1, 2))
    assert not torch.equal(one["tokens"], two["tokens"])
    assert not torch.equal((one["targets"] == IGNORED), (two["targets"] == IGNORED))


# -- regression ----------------------------------------------------------------------------------------------


def test_inputs_look_random_and_rows_differ() -> None:
    batch = SyntheticRegression(64, seed=0).samples(0, 0, 512, 512)
    x_BD = batch["x"]
    assert x_BD.dtype == torch.float32 and x_BD.shape == batch["y"].shape == (512, 64)
    assert x_BD.mean().abs() < 0.02 and (x_BD.var() - 1).abs() < 0.02
    assert torch.corrcoef(x_BD.T).triu(1).abs().max() < 0.3
    assert len(x_BD.unique()) > 0.99 * x_BD.numel()
    assert batch["y"].std() > 0.5


def test_the_mask_is_ragged_and_never_empty() -> None:
    source = SyntheticRegression(2, seed=0)
    masks = torch.stack([source.samples(step, 0, 8, 8)["mask"] for step in range(200)])
    assert set(masks.unique().tolist()) == {0.0, 1.0}
    assert masks[:, 0].all()
    assert 0.6 < masks[:, 1:].mean() < 0.9
    assert SyntheticRegression(2, seed=0, ragged=False).samples(0, 0, 64, 64)["mask"].all()
    assert all(source.samples(step, 0, 1, 1)["mask"].all() for step in range(50))


def test_every_dtype_sees_the_same_numbers() -> None:
    exact = SyntheticRegression(7, seed=3, dtype=torch.float64).samples(4, 1, 5, 9)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = SyntheticRegression(7, seed=3, dtype=dtype).samples(4, 1, 5, 9)
        assert_same_bits(rounded, {key: value.to(dtype) for key, value in exact.items()})


def test_the_tensor_hash_is_the_integer_hash() -> None:
    words = [0, 1, 2**63, 2**64 - 1, *(mix(i) for i in range(50))]
    signed = torch.tensor([word - 2**64 if word >> 63 else word for word in words])
    assert [int(word) % 2**64 for word in scramble_tensor(signed)] == [scramble(word) for word in words]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.booleans(), st.integers(0, 3), st.booleans())
def test_every_sample_once_and_no_rank_without_a_batch(
    size: int, batch_size: int, ranks: int, shuffle: bool, epoch: int, drop_last: bool
) -> None:
    how: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
    if batch_size < ranks or (size < batch_size if drop_last else 0 < size % batch_size < ranks):
        with pytest.raises(ValueError, match="each rank needs a sample of each batch"):
            RankBatches(size, batch_size, Mesh(shard=ranks), 0, **how)
        return
    made = [RankBatches(size, batch_size, Mesh(shard=ranks), rank, **how) for rank in range(ranks)]
    for sampler in made:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in made]
    assert {len(own) for own in batches} == {len(made[0])}
    assert all(batch for own in batches for batch in own)
    together = [[i for own in batches for i in own[number]] for number in range(len(made[0]))]
    alone = DistributedSampler(range(size), 1, 0, shuffle=shuffle, seed=5)  # type: ignore[arg-type]
    alone.set_epoch(epoch)
    assert together == list(BatchSampler(alone, batch_size, drop_last))  # as under every mesh
    for own, sampler in zip(batches, made, strict=True):  # a run goes on in the middle of an epoch
        sampler.set_epoch(epoch, start=len(own) // 2)
        assert list(sampler) == own[len(own) // 2 :] and len(sampler) == len(own) - len(own) // 2
    with pytest.raises(ValueError, match="an epoch has"):
        made[0].set_epoch(epoch, start=len(batches[0]) + 1)


def test_ranks_of_a_pipeline_and_of_a_tensor_group_have_the_same() -> None:
    mesh = Mesh(pipe=2, replica=2, tensor=2)
    batches = [list(RankBatches(7, 4, mesh, rank, shuffle=True)) for rank in range(8)]
    assert batches[0] == batches[1] == batches[4] == batches[5] != batches[2] == batches[3] == batches[6] == batches[7]


def test_a_stock_loader_takes_either() -> None:
    data = [torch.tensor(float(number)) for number in range(11)]

    def body(comm: Comm) -> Any:
        exact = DataLoader(data, batch_sampler=plait.rank_batches(data, 4, comm, seed=3))  # type: ignore[arg-type]
        padded = plait.distributed_sampler(data, comm, seed=3, drop_last=False)
        stock = DataLoader(data, batch_size=2, sampler=padded)  # type: ignore[arg-type]
        return [batch.tolist() for batch in exact], [batch.tolist() for batch in stock]

    exact, stock = zip(*plait.run_threads("shard=2", body), strict=True)
    assert sorted(x for rank in exact for batch in rank for x in batch) == list(range(11))
    assert sum(len(batch) for rank in stock for batch in rank) == 12  # one counts twice: it was asked for


@pytest.mark.parametrize("deal", [partial(plait.rank_batches, batch_size=4), plait.distributed_sampler])
def test_ranks_that_would_deal_differently_are_refused(deal: Any) -> None:
    with pytest.raises(ValueError, match=r"differently: seed is 0 on rank 0, 1 on rank 1\. Give"):
        plait.run_threads("shard=2", lambda comm: deal(range(8), comm=comm, seed=comm.rank))


def test_samples_that_would_count_twice_are_named() -> None:
    with pytest.raises(ValueError, match=r"10 samples do not divide among 4 data ranks: .* out 2 .* lets 2 count"):
        plait.run_threads("replica=2 shard=2", lambda comm: plait.distributed_sampler(range(10), comm))


Pair = namedtuple("Pair", "x y")


@dataclass(slots=True)
class Slots:
    x: Tensor
    y: Any


X, Y = torch.ones(3, 2), torch.ones(3)


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        {"x": X, "y": [Y, 1]},
        Pair(X, Y),
        UserDict(x=X, y=Y),
        SimpleNamespace(x=X, y=(Y,)),
        Slots(X, UserDict(y=Y)),
        [Slots(X, "a"), Y],
    ],
)
def test_tensors_are_found_in_their_order(batch: Any) -> None:
    first, second = batch_tensors(batch)
    assert first is X and second is Y and num_samples(batch) == 3


def test_an_object_of_another_kind_has_none() -> None:
    with pytest.raises(ValueError, match=r"no tensor found in the batch of type object: .* Give a tensor, or tuples"):
        num_samples(object())
    assert not list(batch_tensors(Slots))
