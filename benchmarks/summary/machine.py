"""This machine as a results file names it: processor, vector units, kernel; versions; the load."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from summary.records import Machine, Versions

ROOT = Path(__file__).parents[2]
VECTOR_UNITS = (
    *("avx", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile"),
    *("asimd", "sve", "sve2", "bf16", "i8mm"),
)
"""Flags that are looked for, x86's and ARM's."""


def this_machine() -> Machine:
    """Reads /proc/cpuinfo; missing entries become "unknown processor" and no unit."""
    said: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        said.setdefault(key.strip().lower(), value.strip())
    flags = (said.get("flags") or said.get("features") or "").split()
    processor = said.get("model name") or said.get("cpu part") or "unknown processor"
    if "cpu family" in said and "model" in said:  # a virtual machine may tell no more than the maker by name
        processor += f" (family {said['cpu family']}, model {said['model']})"
    units = tuple(unit for unit in VECTOR_UNITS if unit in flags)
    return Machine(processor, len(os.sched_getaffinity(0)), units, f"{platform.system()} {platform.release()}")


def these_versions() -> Versions:
    try:
        plait = version("plait")
    except PackageNotFoundError:
        plait = "not installed"
    return Versions(plait, torch.__version__, platform.python_version(), _commit())


def _commit() -> str:
    """The repository's commit, with + if a file of plait or the benchmarks differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (commit + "+" * bool(changed)) or "unknown"


def load() -> float:
    """The load average of one minute."""
    return round(os.getloadavg()[0], 2)
