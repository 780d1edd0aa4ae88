"""The order is a permutation for every size, and differs for every seed and epoch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.run.data.order import mix, sample_at, scramble


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


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    orders = {tuple(order(seed, epoch, 100)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert tuple(range(100)) not in orders


def test_known_values() -> None:
    """Another order is another run: every checkpoint's data cursor would point elsewhere."""
    assert scramble(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first output from seed 0
    assert mix(1, 2) != mix(2, 1)
    assert order(0, 0, 10) == [0, 4, 5, 9, 3, 1, 8, 7, 2, 6]


@pytest.mark.parametrize("num_samples", [2, 3, 5, 12])
def test_no_place_prefers_a_sample(num_samples: int) -> None:
    """Over 3,000 seeds each (place, sample) is hit 3000/n times within 5 standard deviations."""
    num_seeds = 3000
    hits = Counter(
        (place, sample_at(seed, 0, place, num_samples)) for seed in range(num_seeds) for place in range(num_samples)
    )
    fair = num_seeds / num_samples
    spread = 5 * (fair * (1 - 1 / num_samples)) ** 0.5
    assert all(abs(hits[i, j] - fair) < spread for i in range(num_samples) for j in range(num_samples))
