"""Runs all GPU measurements in order of value, for a machine that is lent for a quarter of an hour.

    python benchmarks/gpu/lease.py --minutes 12 --json lease.json
    python benchmarks/gpu/lease.py --device cpu --size tiny --minutes 4   # tries the script, where there is no GPU

Each row is one process.  Its result is in the file as soon as it ends, so a lease that ends early loses one row.  Exit
code 1 if a row failed or was left out.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
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
    skip: int = 0
    """The first rows, which an earlier call has measured."""
    json: Path = Path("lease.json")


def command(*words: str, most: float = math.inf) -> Row:
    """A row that runs a command for ``most`` seconds; its result is the exit code and the last lines."""

    def run(seconds: float) -> dict[str, Any]:
        seconds = min(seconds, most)
        with tempfile.TemporaryFile("w+") as told:  # what was told before the time was over is kept
            try:
                code = subprocess.run(words, stdout=told, stderr=subprocess.STDOUT, timeout=seconds).returncode
                wrong = {"error": f"exit code {code}"} if code else {}
            except subprocess.TimeoutExpired:
                code, wrong = None, {"error": f"not done within {seconds:.0f} s"}
            told.seek(0)
            return {"code": code, "last": told.read().splitlines()[-40:]} | wrong

    return run


def contestant(name: str, size: str, device: str) -> Row:
    """A row of ``main.py``: seconds of each step, peak memory, host waits."""
    asked = contestants.Arguments(device=device, rounds=3, steps=8)
    return lambda seconds: contestants.run_contestant(name, size, asked, seconds)


def rows(asked: Arguments) -> dict[str, Row]:
    """All rows, the most valuable first."""
    verify = ["-m", "plait", "verify", "--world", "thread", "--device", asked.device]
    found: dict[str, Row] = {}

    def race(size: str, *names: str) -> None:
        for name in names:
            found[f"{size} {name}"] = contestant(name, size, asked.device)

    race(asked.size, "torch", "plait-zero3", "fsdp2", "plait-ddp", "plait-zero3-threads")
    found["verify"] = command(sys.executable, *verify)
    if asked.size != "tiny":
        race("deep", "torch", "plait-zero3", "plait-ddp")
        race("7b", "torch", "plait-zero3", "fsdp2")
    found["verify, small matrix"] = command(sys.executable, *verify, "--matrix", "small", most=180)
    found["tests marked gpu"] = command(sys.executable, "-m", "pytest", "-q", "-n", "0", str(TESTS), most=90)
    race(asked.size, "torch-compiled", "plait-zero3-compiled", "fsdp2-compiled")
    found["doctor"] = command(sys.executable, "-m", "plait", "doctor", most=60)
    if asked.size != "tiny":
        race("deep", "fsdp2")
    return found


class Utilisation:
    """The share of time in which the GPU ran a kernel while a block runs, by NVML; None without NVML."""

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
    for name, row in list(rows(asked).items())[asked.skip :]:
        start = time.monotonic()
        with Utilisation() as used:
            one = row(end - start) if end - start > LEAST else {"error": f"left out: {end - start:.0f} s are left"}
        one |= {"wall": time.monotonic() - start, "utilisation": used.median}
        results["rows"][name] = one
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
        plain = results["rows"].get(f"{name.partition(' ')[0]} torch", {})
        print(f"{name:28} {one['wall']:6.1f} s  {shown(one, plain)}", flush=True)
    return int(any("error" in one for one in results["rows"].values()))


def shown(one: dict[str, Any], plain: dict[str, Any]) -> str:
    """One line of a row; ``plain`` is the row of plain torch."""
    if "seconds" not in one:
        return "; ".join([one.get("error", "right"), *one.get("last", ())[-1:]])
    seconds, base = (
        statistics.median(second for turn in row["seconds"] for second in turn) if "seconds" in row else math.nan
        for row in (one, plain)
    )
    used = "" if one["utilisation"] is None else f"; {one['utilisation']:.0%} in use"
    of_torch = f"{base / seconds:.3f} of torch"
    return f"{seconds * 1e3:.1f} ms; {of_torch}; {one['peak_bytes'] / 2**30:.2f} GiB; waits {one['waits']}{used}"


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
