"""Measures one machine: memory bandwidth, matrix products, and copies that overlap with them.

Overlap is measured with three clocks: the products alone, the copies alone, both on two CUDA streams.

    compute  |#########|                     hidden = (compute + copy - together) / min(compute, copy)
    copy     |~~~~~~|                        1: the shorter one costs nothing
    together |##########|                    0: one waits for the other
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from plait.tensor.gemm import TORCH, Gemm

NO_GPU = (
    "no CUDA device: on a CPU, copies and products share cores and memory; "
    "only a GPU has a copy engine beside its compute units, and streams to feed both"
)


@dataclass(frozen=True)
class Overlap:
    """The overlap of a host-to-device copy with matrix products.  Times are medians."""

    compute_seconds: float
    copy_seconds: float
    together_seconds: float

    @property
    def hidden(self) -> float:
        """The share of the shorter of the two that costs nothing, from 0 to 1."""
        gained = self.compute_seconds + self.copy_seconds - self.together_seconds
        return max(0.0, min(1.0, gained / min(self.compute_seconds, self.copy_seconds)))


def synchronise(device: str) -> None:
    """Returns when the device has finished all its work."""
    if device != "cpu":
        torch.cuda.synchronize()


def copy_rate(budget: float = 0.5, size: int = 64 << 20, device: str = "cpu") -> float:
    """Bytes per second of a large copy in one memory; each byte is read once and written once."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return size / _median_seconds(lambda: target.copy_(source), budget, device)


def product_rate(budget: float = 0.5, width: int = 1024, device: str = "cpu", gemm: Gemm = TORCH) -> float:
    """Floating-point operations per second of a square fp32 matrix product, with torch's default threads."""
    a, b = torch.ones(width, width, device=device), torch.ones(width, width, device=device)
    return 2 * width**3 / _median_seconds(lambda: gemm.product(a, b), budget, device)


def overlap(width: int = 4096, size: int = 256 << 20) -> Overlap | None:
    """Measures a copy from pinned memory during matrix products.  None without a GPU (``NO_GPU`` says why)."""
    if not torch.cuda.is_available():
        return None
    a, out = torch.ones(width, width, device="cuda"), torch.empty(width, width, device="cuda")
    source = torch.ones(size // 4, pin_memory=True)
    target = torch.empty(size // 4, device="cuda")
    compute, copier = torch.cuda.Stream(), torch.cuda.Stream()

    def work(copies: int, products: int) -> None:
        with torch.cuda.stream(copier):
            for _ in range(copies):
                target.copy_(source, non_blocking=True)
        with torch.cuda.stream(compute):
            for _ in range(products):
                torch.mm(a, a, out=out)

    copy, product = (_median_seconds(partial(work, *numbers), 0.3, "cuda") for numbers in ((1, 0), (0, 1)))
    number = max(1, round(copy / product))  # as many products as take the time of the copy
    alone, together = (_median_seconds(partial(work, copies, number), 0.3, "cuda") for copies in (0, 1))
    return Overlap(alone, copy, together)


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: torch's allocations on a CUDA device, otherwise the process's resident memory.

    Ranks that are threads share a process, and each reads the memory of all.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _median_seconds(work: Callable[[], object], budget: float, device: str) -> float:
    """The median time of ``work`` over as many calls as fit into ``budget`` seconds (at least 3)."""
    work()
    synchronise(device)
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
