"""Measures one machine: memory bandwidth, matrix products, the memory that a rank has used."""

import resource
from collections.abc import Callable

import torch


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def copy_rate(budget: float = 0.5, size: int = 64 << 20, device: str = "cpu") -> float:
    """Bytes per second of a large copy in one memory; each byte is read once and written once."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return size / _median_seconds(lambda: target.copy_(source), budget)


def product_rate(budget: float = 0.5, width: int = 1024, device: str = "cpu") -> float:
    """Floating-point operations per second of a square fp32 matrix product, with torch's default threads."""
    a, b = torch.ones(width, width, device=device), torch.ones(width, width, device=device)
    return 2 * width**3 / _median_seconds(lambda: a @ b, budget)


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: torch's allocations on a CUDA device, otherwise the process's resident memory, which ranks
    that are threads share."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _median_seconds(work: Callable[[], object], budget: float) -> float:
    """The median time of ``work`` over as many calls as fit into ``budget`` seconds."""
    from torch.utils.benchmark import Timer  # plait train has another use for this module

    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=budget).median
