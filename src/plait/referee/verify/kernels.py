"""Kernels that give the same bits each time, for a layout and its replay on a GPU.

The fused backwards of attention add in no fixed order on a GPU, so attention uses products and a softmax.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """Makes a device other than the CPU repeat its bits wherever torch has a kernel that does, without TF32.

    Threads share these settings, so enter it before they start.
    """
    if device == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tf32, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with sdpa_kernel(SDPBackend.MATH), cudnn.flags(enabled=cudnn.enabled, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.backends.cuda.matmul.allow_tf32 = tf32
