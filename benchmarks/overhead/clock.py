"""CPU time of a step, by turns.

CPU time and not the clock on the wall: it leaves out waiting, for other ranks and for other people's programs.
*Own* is the thread that trains; CPU autograd runs its backward there too.  *All* is every thread of the process, so
also those of gloo, which carry messages.

Contestants take turns, a round starts one contestant later than the one before, and what is subtracted from a
contestant is the plain loop *of the same round*.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from harness.turns import no_collection, rotated

CLOCKS: dict[str, Callable[[], float]] = {
    "own": time.thread_time,
    "all": time.process_time,
    "wall": time.perf_counter,
}
Times = dict[str, dict[str, list[float]]]
"""Contestant -> clock -> microseconds of a step, a number per round."""


def microseconds(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """The time of one call, by each clock."""
    call()
    with no_collection():
        dist.barrier()
        start = {name: clock() for name, clock in CLOCKS.items()}
        for _ in range(repeats):
            call()
        return {name: 1e6 * (clock() - start[name]) / repeats for name, clock in CLOCKS.items()}


def take_turns(calls: Mapping[str, Callable[[], object]], rounds: int, repeats: int) -> Times:
    times: Times = {name: {clock: [] for clock in CLOCKS} for name in calls}
    for name in calls:
        for _ in range(2):
            calls[name]()
    for turn in range(rounds):
        for name in rotated(list(calls), turn):
            for clock, value in microseconds(calls[name], repeats).items():
                times[name][clock].append(value)
    return times


def dearest(values: list[float]) -> list[float]:
    """Round by round the number of the rank that has the largest."""
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    found: list[float] = numbers.tolist()
    return found


def median(values: list[float]) -> float:
    return statistics.median(values)
