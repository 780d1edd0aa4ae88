"""Memory of a contestant; every function here runs inside a rank.

Memory cannot be interleaved (an allocator remembers its neighbours): one contestant, one process group.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from harness.contestants import Build
from harness.models import Batch, Workload
from harness.turns import NUM_CHECKED_STEPS, over_ranks
from models import TINY

MEBIBYTE = 1 << 20


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
