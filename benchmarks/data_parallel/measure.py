"""How time, losses and memory are measured; every function here runs inside a rank.

Machines drift, so absolute milliseconds of two runs do not compare. Contestants therefore take turns inside
*one* process group: a round gives each of them one untimed and then a few timed steps, the next round
starts one contestant later. A ratio is formed inside its round, and the median over rounds is reported.

    round 0   local  ddp  fsdp2  plait-zero3
    round 1   ddp  fsdp2  plait-zero3  local        ratio = median over rounds of (peer's / ours)
    ...

Memory cannot be interleaved (an allocator remembers its neighbours): one contestant, one process group.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from models import TINY, Batch, Workload
from peers import Build, Contestant

NUM_CHECKED_STEPS = 4
MEBIBYTE = 1 << 20


def over_ranks(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, operation)
    return float(number)


def seconds_per_step(contestant: Contestant, batches: Sequence[Batch], num_steps: int) -> float:
    """Mean seconds of ``num_steps`` steps between two points in time, the slowest rank's."""
    contestant.step(batches[0])  # brings this contestant's weights back into the cache
    contestant.finish()
    gc.collect()
    gc.disable()
    dist.barrier()
    start = time.perf_counter()
    for step in range(num_steps):
        contestant.step(batches[step % len(batches)])
    contestant.finish()
    seconds = (time.perf_counter() - start) / num_steps
    gc.enable()
    return over_ranks(seconds, dist.ReduceOp.MAX)


def checked_losses(contestant: Contestant, batches: Sequence[Batch]) -> list[float]:
    """The global mean loss of the first steps, the same number for every correct contestant."""
    losses = []
    for step in range(NUM_CHECKED_STEPS):
        loss = float(contestant.step(batches[step % 2]))  # seen twice, so that what was learned shows
        if not contestant.loss_is_global:
            loss = over_ranks(loss, dist.ReduceOp.SUM) / dist.get_world_size()
        losses.append(loss)
    return losses


def interleave(
    contestants: dict[str, Contestant], batches: Sequence[Batch], num_rounds: int, num_steps: int
) -> dict[str, list[float]]:
    """Seconds per step of every contestant in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(num_rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
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
    """How many times faster ours is, formed round by round."""
    return Spread.of([t / o for t, o in zip(theirs, ours, strict=True)])


def pss_bytes() -> int:
    """Proportional set size: this rank's pages, shared ones divided by who shares them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no Pss line: memory is measured on Linux only")


def peak_rss_bytes() -> int:
    """The kernel's own high-water mark of resident pages: cannot miss a peak between two samples."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line: memory is measured on Linux only")


@contextmanager
def sampled_pss(seconds_between: float = 0.002) -> Iterator[list[int]]:
    """A list that holds, at the end, the highest PSS that a sampling thread saw."""
    highest = [pss_bytes()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(seconds_between):
            highest[0] = max(highest[0], pss_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        done.set()
        thread.join()


def memory_mebibytes(build: Build, workload: Workload, batches: Sequence[Batch]) -> dict[str, float]:
    """Peak and resting memory of one contestant above an idle rank; the larger rank's.

    The baseline is taken before the model exists, but after the same engine has trained a tiny model: what
    it imports lazily (tens of MiB for some) and its connections are not held against it. The peak counts
    building the model as well as training it.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tiny = build(TINY, ranks)
    for step in range(2):
        tiny.step(TINY.batch(step, rank, ranks))
    del tiny
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present
    base_pss, base_rss = pss_bytes(), peak_rss_bytes()
    with sampled_pss() as highest:
        contestant = build(workload, ranks)
        for step in range(NUM_CHECKED_STEPS):
            contestant.step(batches[step % len(batches)])
    result = {
        "peak_pss": highest[0] - base_pss,
        "peak_rss": peak_rss_bytes() - base_rss,
        "resting_pss": pss_bytes() - base_pss,
    }
    return {key: over_ranks(value, dist.ReduceOp.MAX) / MEBIBYTE for key, value in result.items()}
