"""The driver is asked in the background; where nobody can be asked, the share is unknown and nothing fails."""

from __future__ import annotations

import time

import pytest
import torch

from plait.run.measure.gpu import GpuUtilisation


def test_the_mean_of_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: [10, 75][index])
    with GpuUtilisation(1, interval=0.001) as watched:
        while len(watched.samples) < 3:
            time.sleep(0.001)
    assert watched.share == 0.75


def test_without_a_driver_the_share_is_unknown() -> None:
    with GpuUtilisation(10**6, interval=0.001) as watched:
        time.sleep(0.01)
    assert watched.share is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_busy_gpu_is_seen() -> None:
    pytest.importorskip("pynvml")
    x = torch.randn(4096, 4096, device="cuda")
    with GpuUtilisation(0) as watched:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            x = (x @ x).tanh()
        torch.cuda.synchronize()
    assert watched.share is not None and watched.share > 0.3
