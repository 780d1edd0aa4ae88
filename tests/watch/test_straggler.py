"""A rank twice as slow is seen within 20 steps; noise is not taken for one."""

import random

import pytest

from plait.run.watch.page import Status
from plait.run.watch.rank import RECENT
from plait.run.watch.straggler import SPAN, WINDOW, stragglers
from plait.table.mesh import Mesh

Times = list[list[float]]
"""Seconds computed, by rank and step."""


def statuses(times: Times, last: int) -> list[Status]:
    return [
        Status(rank, pid=1, finished=last, steps=[[t, 0.0] for t in mine[max(0, last - RECENT) : last]])
        for rank, mine in enumerate(times)
    ]


def noisy(draw: random.Random, ranks: int, steps: int, spread: float) -> Times:
    """Steps of one second with log-normal noise, which partly lasts (a busy machine), and now and then one that takes
    five times as long (a checkpoint, an evaluation)."""
    times = []
    for _ in range(ranks):
        mine, lasting = [], 0.0
        for _ in range(steps):
            lasting = 0.8 * lasting + draw.gauss(0, spread / 2)
            long = 5.0 if draw.random() < 0.02 else 1.0
            mine.append(long * 2.718281828 ** (lasting + draw.gauss(0, spread)))
        times.append(mine)
    return times


def false_alarms(runs: int, steps: int, ranks: int, spread: float) -> int:
    """In how many of so many runs without a slow rank one is called slow."""
    draw, mesh, alarms = random.Random(1), Mesh(shard=ranks), 0
    for _ in range(runs):
        times = noisy(draw, ranks, steps, spread)
        alarms += any(stragglers(statuses(times, last), mesh) for last in range(WINDOW, steps + 1, WINDOW // 2))
    return alarms


@pytest.mark.parametrize("ranks", [2, 3])
def test_noise_is_no_straggler(ranks: int) -> None:
    assert false_alarms(100, 100, ranks, 0.1) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_false_alarms_in_a_thousand_runs(ranks: int) -> None:
    alarms = false_alarms(1000, 200, ranks, 0.1)
    print(f"{ranks} ranks: {alarms} of 1000 runs; {false_alarms(1000, 200, ranks, 0.2)} where noise is twice as wide")
    assert alarms < 10


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_twice_as_slow_is_seen_within_twenty_steps(ranks: int) -> None:
    draw, seen = random.Random(2), 0
    for _ in range(40):
        times = noisy(draw, ranks, 60, 0.1)
        slow = draw.randrange(ranks)
        times[slow] = [t * (2 if step >= 30 else 1) for step, t in enumerate(times[slow])]
        looks = [statuses(times, last) for last in range(30, 51)]
        found = [rank for look in looks for rank, _ in stragglers(look, Mesh(shard=ranks))]
        assert set(found) <= {slow}
        seen += bool(found)
    print(f"{ranks} ranks: {seen} of 40")
    assert seen >= 37


def test_a_moment_of_a_busy_machine_is_no_straggler() -> None:
    for milliseconds in (8, 40):
        step = milliseconds / 1000
        times = [[step] * 400 for _ in range(3)]
        times[0][200 : 200 + int(0.7 / 4 / step)] = [4 * step] * int(0.7 / 4 / step)  # for 0.7 s
        assert not any(stragglers(statuses(times, last), Mesh(shard=3)) for last in range(1, 400))
        times[0][200:] = [2 * step] * 200
        looks = [last for last in range(200, 400) if stragglers(statuses(times, last), Mesh(shard=3))]
        assert looks[0] - 200 <= max(WINDOW, SPAN / (2 * step))


def test_steps_of_which_the_page_has_too_few_are_not_compared() -> None:
    times = [[SPAN / RECENT / 4] * 400, [SPAN / RECENT / 2] * 400]
    assert stragglers(statuses(times, 400), Mesh(shard=2)) == []


def test_stages_are_compared_with_their_own_kind_only() -> None:
    stage = [[1.0] * 20, [1.0] * 20, [3.0] * 20, [3.0] * 20]
    assert stragglers(statuses(stage, 20), Mesh(pipe=2, shard=2)) == []
    stage[3] = [6.0] * 20
    text = "computes 2.0 times as long as its peers: 6 s a step against 3 s, over 16 steps"
    assert stragglers(statuses(stage, 20), Mesh(pipe=2, shard=2)) == [(3, text)]
    assert stragglers(statuses(stage, 20), Mesh(pipe=4)) == []


def test_ranks_that_are_a_step_apart_are_compared_step_by_step() -> None:
    long = [5.0 if step % 2 else 1.0 for step in range(40)]
    ahead, behind = statuses([long], 30)[0], statuses([long, long], 29)[1]
    assert stragglers([ahead, behind], Mesh(shard=2)) == []
