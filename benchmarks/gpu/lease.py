"""Everything worth knowing of one GPU, in order of value, for a machine that is lent for a quarter of an hour.

    python benchmarks/gpu/lease.py --minutes 12 --json lease.json
    python benchmarks/gpu/lease.py --device cpu --size tiny --minutes 4   # tries the script, where there is no GPU

Each row is one process.  Its result is in the file as soon as it ends, so a lease that ends early loses one row.  Exit
code 1 if a row failed or was left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import main as contestants
import tyro

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests" / "device" / "test_gpu.py"
LEAST = 20
"""Seconds without which no row is started."""
Row = Callable[[float], dict[str, Any]]
"""Runs within so many seconds; its numbers, with ``error`` where it failed."""


@dataclass(frozen=True)
class Arguments:
    """Measure one GPU in order of value."""

    minutes: float = 12.0
    device: str = "cuda"
    size: Literal["tiny", "1b"] = "1b"
    """The decoder that comes first."""
    json: Path = Path("lease.json")


def command(*words: str) -> Row:
    """A row that runs a command; its result is the exit code and the last lines."""

    def run(seconds: float) -> dict[str, Any]:
        try:
            ran = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {seconds:.0f} s"}
        last = (ran.stdout + ran.stderr).splitlines()[-12:]
        return {"code": ran.returncode, "last": last} | ({"error": last[-1:]} if ran.returncode else {})

    return run


def contestant(name: str, size: str, device: str) -> Row:
    """A row of ``main.py``: seconds of each step, peak memory, host waits."""
    asked = contestants.Arguments(device=device, rounds=2, steps=5)
    return lambda seconds: contestants.run_contestant(name, size, asked, seconds)


def rows(asked: Arguments) -> dict[str, Row]:
    """All rows, the most valuable first."""
    verify = ["-m", "plait", "verify", "--world", "thread", "--device", asked.device]
    found: dict[str, Row] = {}
    for name in ("plait-zero3", "torch", "fsdp2"):
        found[f"{asked.size} {name}"] = contestant(name, asked.size, asked.device)
    found["tests marked gpu"] = command(sys.executable, "-m", "pytest", "-q", "-n", "0", str(TESTS))
    found["verify"] = command(sys.executable, *verify)
    for name in ("plait-zero3-threads", "plait-ddp"):
        found[f"{asked.size} {name}"] = contestant(name, asked.size, asked.device)
    found["verify, small matrix"] = command(sys.executable, *verify, "--matrix", "small")
    if asked.size != "tiny":
        for size in ("deep", "7b"):
            for name in ("plait-zero3", "torch", "fsdp2"):
                found[f"{size} {name}"] = contestant(name, size, asked.device)
    return found


class Utilisation:
    """The share of time in which the GPU ran a kernel, as NVML tells it, while a block runs; None without NVML."""

    def __enter__(self) -> Utilisation:
        self._seen: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(5)

    def _look(self) -> None:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0"]
        while not self._ended.wait(0.5):
            try:
                self._seen.append(int(subprocess.run(query, capture_output=True, text=True, timeout=5).stdout))
            except (OSError, ValueError, subprocess.TimeoutExpired):
                return

    @property
    def median(self) -> float | None:
        """The median over the samples in which the GPU was in use."""
        busy = [percent for percent in self._seen if percent]
        return statistics.median(busy) / 100 if busy else None


def main(asked: Arguments) -> int:
    end = time.monotonic() + 60 * asked.minutes
    results: dict[str, Any] = {"device": asked.device, "rows": {}}
    for name, row in rows(asked).items():
        start = time.monotonic()
        with Utilisation() as used:
            one = row(end - start) if end - start > LEAST else {"error": f"left out: {end - start:.0f} s are left"}
        one |= {"wall": time.monotonic() - start, "utilisation": used.median}
        results["rows"][name] = one
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name:28} {one['wall']:6.1f} s  {shown(one)}", flush=True)
    return int(any("error" in one for one in results["rows"].values()))


def shown(one: dict[str, Any]) -> str:
    """One line of a row."""
    if "error" in one:
        return str(one["error"])
    if "seconds" not in one:
        return str(one["last"][-1:])
    seconds = statistics.median(second for turn in one["seconds"] for second in turn)
    used = "" if one["utilisation"] is None else f"; {one['utilisation']:.0%} in use"
    return f"{seconds * 1e3:.1f} ms; {one['peak_bytes'] / 2**30:.2f} GiB; waits {one['waits']}{used}"


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
