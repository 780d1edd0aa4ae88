"""Measures time and losses; every function here runs inside a rank.

Machines drift, so absolute milliseconds of two runs do not compare. Contestants therefore take turns inside
*one* process group: a round gives each of them one untimed and then a few timed steps, the next round
starts one contestant later. A ratio is formed inside its round, and the median over rounds is reported.

    round 0   local  ddp  fsdp2  plait-zero3
    round 1   ddp  fsdp2  plait-zero3  local        ratio = median over rounds of (peer's / ours)
    ...
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from harness.contestants import Contestant
from harness.models import Batch

NUM_CHECKED_STEPS = 4
T = TypeVar("T")


def over_ranks(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, operation)
    return float(number)


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector runs before, not inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds_per_step(contestant: Contestant, batches: Sequence[Batch], num_steps: int) -> float:
    """Mean seconds of ``num_steps`` steps between two points in time, the slowest rank's."""
    contestant.step(batches[0])  # brings this contestant's weights back into the cache
    contestant.finish()
    with no_collection():
        dist.barrier()
        start = time.perf_counter()
        for step in range(num_steps):
            contestant.step(batches[step % len(batches)])
        contestant.finish()
        seconds = (time.perf_counter() - start) / num_steps
    return over_ranks(seconds, dist.ReduceOp.MAX)


def passes_in_turns(acts: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of the processor, and of the clock, of every act in every round, after an untimed pass.

    The slowest rank counts.  A rank that waits for others gives an act that does nothing.
    """
    found: dict[str, dict[str, list[float]]] = {of: {name: [] for name in acts} for of in ("seconds", "clocks")}
    for turn in range(rounds):
        for name in rotated(list(acts), turn):
            with no_collection():
                for _ in range(2):
                    dist.barrier()
                    cpu, wall = time.process_time(), time.perf_counter()
                    acts[name]()
                    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            for of, value in (("seconds", cpu), ("clocks", wall)):
                found[of][name].append(over_ranks(value, dist.ReduceOp.MAX))
    return found


def checked_losses(contestant: Contestant, batches: Sequence[Batch]) -> list[float]:
    """The global mean loss of the first steps, the same number for every correct contestant."""
    losses = []
    for step in range(NUM_CHECKED_STEPS):
        loss = float(contestant.step(batches[step % 2]))  # seen twice, so that what was learned shows
        if contestant.loss_is_global:
            loss = over_ranks(loss if dist.get_rank() == contestant.loss_rank else 0.0, dist.ReduceOp.SUM)
        else:
            loss = over_ranks(loss, dist.ReduceOp.SUM) / dist.get_world_size()
        losses.append(loss)
    return losses


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """The order of a round: each starts one later than the round before."""
    shift = turn % len(names)
    return [*names[shift:], *names[:shift]]


def interleave(
    contestants: dict[str, Contestant], batches: Sequence[Batch], num_rounds: int, num_steps: int
) -> dict[str, list[float]]:
    """Seconds per step of every contestant in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(num_rounds):
        for name in rotated(list(contestants), turn):
            seconds[name].append(seconds_per_step(contestants[name], batches, num_steps))
    return seconds


@dataclass(frozen=True)
class Spread:
    """The median of a few measurements, and how far they lie apart."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> Spread:
    """The factor by which ours is faster, formed round by round."""
    return Spread.of([t / o for t, o in zip(theirs, ours, strict=True)])


def profiled(contestant: Contestant, batch: Batch, num_steps: int, out: Path | None) -> str:
    """torch.profiler's table of a few steps on this rank; ``out``: where rank 0's Chrome trace goes beside it."""
    for _ in range(3):
        contestant.step(batch)
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(num_steps):
            contestant.step(batch)
    if out is not None and dist.get_rank() == 0:
        profile.export_chrome_trace(str(out.with_suffix(".trace.json")))
    table: str = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
    return f"{num_steps} steps on rank 0 of {dist.get_world_size()}\n{table}"
