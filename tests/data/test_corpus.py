"""The order is a permutation; every sample is in an epoch once; packed rows hold every pair of neighbours once."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.run.data.batches import IGNORED, Batch
from plait.run.data.corpus import Corpus, Epochs
from plait.run.data.order import mix, sample_at, scramble
from plait.run.data.packing import PackedBatches, best_fit
from plait.run.data.windows import TextBatches


def order(seed: int, epoch: int, num_samples: int) -> list[int]:
    return [sample_at(seed, epoch, index, num_samples) for index in range(num_samples)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**9), num_samples=st.integers(1, 700))
def test_any_seed_epoch_and_size_is_a_permutation(seed: int, epoch: int, num_samples: int) -> None:
    assert sorted(order(seed, epoch, num_samples)) == list(range(num_samples))


def test_a_huge_epoch_needs_no_memory_and_no_time() -> None:
    num_samples = 10**15 + 7
    seen = [sample_at(5, 2, index, num_samples) for index in range(num_samples - 1000, num_samples)]
    assert len(set(seen)) == 1000 and all(0 <= sample < num_samples for sample in seen)


def test_known_values() -> None:
    """Another order is another run: every checkpoint's data cursor would point elsewhere."""
    assert scramble(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first output from seed 0
    assert mix(1, 2) != mix(2, 1)
    assert order(0, 0, 10) == [0, 4, 5, 9, 3, 1, 8, 7, 2, 6]


BLANK = -1


class Numbers(Corpus):
    """Sample i is the number i and where in the run it stands."""

    def __init__(self, num_samples: int, seed: int = 3) -> None:
        self._num_samples, self.seed = num_samples, seed

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def sample(self, number: int, entry: int) -> Batch:
        return {"number": torch.tensor(number), "entry": torch.tensor(entry)}

    def blank(self) -> Batch:
        return {"number": torch.tensor(BLANK), "entry": torch.tensor(BLANK)}


def dealt(source: Epochs | Corpus, step: int, ranks: int, microbatches: int, global_batch: int) -> list[list[int]]:
    """The numbers of every microbatch of a step, in the order of ranks; those without samples are empty here."""
    parts = [source.microbatches(step, rank, ranks, microbatches, global_batch) for rank in range(ranks)]
    assert all(len(part) == microbatches for part in parts)
    every = [batch["number"].tolist() for part in parts for batch in part]
    return [[] if numbers == [BLANK] else numbers for numbers in every]


def test_the_drawing_of_the_module() -> None:
    corpus = Numbers(7)
    order = [int(n) for n in corpus.entries(0, 21)["number"]]
    assert [sorted(order[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert order[:7] != order[7:14] != order[14:]
    run_on = [n for step in range(7) for part in dealt(corpus, step, 1, 1, 3) for n in part]
    assert run_on == order
    epochs = [dealt(Epochs(corpus), step, 1, 1, 3)[0] for step in range(9)]
    assert [len(step) for step in epochs] == [3, 3, 1] * 3
    assert [n for step in epochs for n in step] == order


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 40),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    more=st.integers(0, 9),
    shuffled=st.booleans(),
)
def test_every_sample_is_in_an_epoch_once(
    num_samples: int, ranks: int, microbatches: int, more: int, shuffled: bool
) -> None:
    global_batch = ranks * microbatches + more
    source = Epochs(Numbers(num_samples), shuffled=shuffled)
    steps = source.num_steps(global_batch)
    for epoch in (0, 2):
        every = [dealt(source, epoch * steps + i, ranks, microbatches, global_batch) for i in range(steps)]
        sizes = [sum(map(len, parts)) for parts in every]
        assert sizes == [source.size(epoch * steps + i, global_batch) for i in range(steps)]
        assert sizes[:-1] == [global_batch] * (steps - 1) and 0 < sizes[-1] <= global_batch
        numbers = [n for parts in every for part in parts for n in part]
        assert sorted(numbers) == list(range(num_samples))
        assert shuffled or numbers == list(range(num_samples))


def test_a_step_smaller_than_its_parts_has_blank_samples_in_the_last_of_them() -> None:
    source = Epochs(TextBatches(bytes(range(63)), 6, seed=0))  # 10 samples
    parts = [[batch for rank in range(2) for batch in source.microbatches(step, rank, 2, 2, 8)] for step in range(4)]
    targets = [[int((batch["targets"] != IGNORED).sum()) for batch in step] for step in parts]
    assert targets == [[12, 12, 12, 12], [6, 6, 0, 0]] * 2
    for batch in parts[1]:
        assert {name: (t.shape, t.dtype) for name, t in batch.items()} == {
            name: (torch.Size([1, 6]), torch.int64) for name in ("tokens", "targets")
        }
    assert source.samples(1, 2, 0, 8)["tokens"].shape == (0, 6)


def test_what_is_drawn_anew_knows_its_place_in_the_run() -> None:
    source = Epochs(Numbers(7))
    places = [source.samples(step, 0, source.size(step, 3), 3)["entry"].tolist() for step in range(6)]
    assert [n for step in places for n in step] == list(range(14))


def rows_of(source: PackedBatches) -> list[dict[str, torch.Tensor]]:
    return [source.sample(number, 0) for number in range(source.num_samples)]


def numbered(*sizes: int) -> list[torch.Tensor]:
    """Documents in which a token tells its document and its place."""
    return [1000 * (i + 1) + torch.arange(size) for i, size in enumerate(sizes)]


def test_the_drawing_of_packed_rows() -> None:
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
