"""Packed rows hold every pair of neighbours of every document once, and no other pair."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.run.data.batches import IGNORED
from plait.run.data.packing import PackedBatches, best_fit


def rows_of(source: PackedBatches) -> list[dict[str, torch.Tensor]]:
    return [source.sample(number, 0) for number in range(source.num_samples)]


def numbered(*sizes: int) -> list[torch.Tensor]:
    """Documents in which a token tells its document and its place."""
    return [1000 * (i + 1) + torch.arange(size) for i, size in enumerate(sizes)]


def test_the_drawing_of_the_module() -> None:
    a, b, c = numbered(4, 3, 8)
    source = PackedBatches([a, b, c], 5, seed=0)
    assert source.num_samples == 3
    tokens, targets, documents = (
        torch.stack([row[name] for row in rows_of(source)]).tolist() for name in ("tokens", "targets", "documents")
    )
    none = IGNORED
    assert tokens == [[3000, 3001, 3002, 3003, 3004], [1000, 1001, 1002, 2000, 2001], [3005, 3006, 0, 0, 0]]
    assert targets == [[3001, 3002, 3003, 3004, 3005], [1001, 1002, 1003, 2001, 2002], [3006, 3007, none, none, none]]
    assert documents == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda sizes: max(sizes) > 1),
    length=st.integers(1, 12),
)
def test_every_pair_of_neighbours_is_a_target_once(sizes: list[int], length: int) -> None:
    documents = numbered(*sizes)
    source = PackedBatches(documents, length, seed=0)
    found: Counter[tuple[int, int]] = Counter()
    for row in rows_of(source):
        held = row["targets"] != IGNORED
        found.update(zip(row["tokens"][held].tolist(), row["targets"][held].tolist(), strict=True))
        same = row["documents"][1:] == row["documents"][:-1]
        assert torch.equal(same & held[1:], (row["tokens"][1:] == row["tokens"][:-1] + 1) & held[1:])
        assert row["documents"][0] == 0 and set(row["documents"].diff().tolist()) <= {0, 1}
    expected = [(a, b) for row in documents for a, b in zip(row.tolist(), row.tolist()[1:], strict=False)]
    assert found == Counter(expected)


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), max_size=50))
def test_rows_are_full_where_they_can_be(sizes: list[int]) -> None:
    rows = best_fit(sizes, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in row) for row in rows]
    assert all(0 < total <= 20 for total in sums)
    opened_by = [sizes[row[0]] for row in rows]
    assert all(sums[i] + opened_by[j] > 20 for i in range(len(rows)) for j in range(i + 1, len(rows)))


def test_the_best_fit_is_taken_not_the_first() -> None:
    # after 7 and 8, the spaces are 3 and 2: a 2 goes where it leaves nothing
    assert best_fit([7, 8, 2], 10) == [[1, 2], [0]]


def test_bytes_are_tokens() -> None:
    source = PackedBatches([b"abc", b"", b"z", b"de"], 4, seed=0)
    row = source.sample(0, 0)
    assert source.num_samples == 1
    assert row["tokens"].tolist() == [97, 98, 100, 0] and row["documents"].tolist() == [0, 0, 1, 2]
    assert row["targets"].tolist() == [98, 99, 101, IGNORED]
    assert all(tensor.dtype == torch.int64 for tensor in row.values())


def test_the_rows_are_the_same_for_every_seed_and_their_order_is_not() -> None:
    documents = numbered(*(3 + i * 7 % 19 for i in range(40)))
    one, two = (PackedBatches(documents, 8, seed=seed) for seed in (0, 1))
    n = one.num_samples
    assert all(torch.equal(a[k], b[k]) for a, b in zip(rows_of(one), rows_of(two), strict=True) for k in a)
    epochs = [source.entries(epoch * n, n)["tokens"] for source in (one, two) for epoch in (0, 1)]
    every = [sorted(map(tuple, rows.tolist())) for rows in epochs]
    assert every.count(every[0]) == 4
    assert len({tuple(map(tuple, rows.tolist())) for rows in epochs}) == 4


def test_ragged_rows_keep_a_first_part_of_their_targets() -> None:
    documents = numbered(*(3 + i * 7 % 19 for i in range(40)))
    whole = PackedBatches(documents, 16, seed=0).entries(0, 20)
    ragged = PackedBatches(documents, 16, seed=0, ragged=True).entries(0, 20)
    assert torch.equal(whole["tokens"], ragged["tokens"]) and torch.equal(whole["documents"], ragged["documents"])
    counts = (ragged["targets"] != IGNORED).sum(1)
    assert counts.min() >= 1 and len(set(counts.tolist())) > 3
    for found, expected in zip(ragged["targets"], whole["targets"], strict=True):
        kept = int((found != IGNORED).sum())
        assert torch.equal(found[:kept], expected[:kept])
