"""The most memory that this rank has had so far, as its system counts it."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: of a CUDA device what torch has had allocated on it, otherwise the process's resident memory.

    Ranks that are threads share a process, and each reads the whole of it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
