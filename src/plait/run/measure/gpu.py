"""Samples a GPU's utilisation during a run from its driver, which torch asks through the package nvidia-ml-py.

The busy share of ``timeline`` is the host's view: the time in which a rank does not wait for others.  On a GPU kernels
keep running after their call has returned; the driver counts the share of time in which any kernel ran.
"""

import threading
from statistics import fmean
from typing import Self

import torch


class GpuUtilisation:
    """Samples the driver of device ``index`` (as CUDA numbers it) in a thread, from entering to leaving."""

    def __init__(self, index: int, interval: float = 0.1) -> None:  # seconds; the driver averages over about as long
        self.index, self.interval = index, interval
        self.samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    @property
    def share(self) -> float | None:
        """The mean share of time in which a kernel ran.  None if there is no driver to ask."""
        return fmean(self.samples) if self.samples else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        try:
            while not self._stop.wait(self.interval):
                self.samples.append(torch.cuda.utilization(self.index) / 100)
        except Exception:  # no package, or a driver that does not report it: the share stays unknown
            return
