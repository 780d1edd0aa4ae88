"""Samples a GPU's utilisation during a run from its driver (NVML, through the package nvidia-ml-py).

The busy share of ``timeline`` is the host's view: the time in which a rank does not wait for others.  On a GPU kernels
keep running after their call has returned; the driver counts the share of time in which any kernel ran.
"""

import importlib
import importlib.util
import threading
from statistics import fmean
from typing import Any, Self


class GpuUtilisation:
    """Samples the driver of device ``index`` (as CUDA numbers it) in a thread, from entering to leaving."""

    def __init__(self, index: int, interval: float = 0.1) -> None:  # seconds; the driver averages over about as long
        self.index, self.interval = index, interval
        self.samples: list[float] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def share(self) -> float | None:
        """The mean share of time in which a kernel ran.  None if there is no driver to ask."""
        return fmean(self.samples) if self.samples else None

    def __enter__(self) -> Self:
        if importlib.util.find_spec("pynvml") is not None:
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _ask(self) -> None:
        nvml: Any = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            device = nvml.nvmlDeviceGetHandleByIndex(self.index)
            while not self._stop.wait(self.interval):
                self.samples.append(nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            return  # the driver does not report it: the share stays unknown
