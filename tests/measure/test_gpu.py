"""The driver is asked in the background; where nobody can be asked, the share is unknown and nothing fails."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from plait.run.measure.gpu import GpuUtilisation


def driver(rates: list[int], fails: bool = False) -> ModuleType:
    """A stand-in for NVML, of which this machine may have none: the real one runs in the test marked gpu."""
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def init() -> None:
        if fails:
            raise NVMLError("no driver")

    module.NVMLError = NVMLError  # type: ignore[attr-defined]
    module.nvmlInit, module.nvmlShutdown = init, lambda: None  # type: ignore[attr-defined]
    module.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    module.nvmlDeviceGetUtilizationRates = lambda device: SimpleNamespace(gpu=rates[device])  # type: ignore[attr-defined]
    module.__spec__ = SimpleNamespace(name="pynvml")  # type: ignore[assignment]
    return module


def test_the_mean_of_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver([10, 75]))
    with GpuUtilisation(1, interval=0.001) as watched:
        while len(watched.samples) < 3:
            time.sleep(0.001)
    assert watched.share == 0.75


def test_without_a_driver_the_share_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver([], fails=True))
    with GpuUtilisation(0, interval=0.001) as watched:
        pass
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
