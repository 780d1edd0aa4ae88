"""Measures one GPU in one run: decoders under plain torch, FSDP2 and plait; ranks as threads; waits of the host.

    python benchmarks/gpu/main.py --minutes 9              # fits a lease; prints each row as its contestant ends
    python benchmarks/gpu/main.py --sizes 1b --json gpu.json
    python benchmarks/gpu/main.py --device cpu --sizes tiny  # tries the script itself, where there is no GPU

Each contestant of a size has one process, for memory, in which all its rounds run.  Exit code 1 if one fails or if
their losses disagree.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from decoders import SIZES, Size

CONTESTANTS = ("torch", "fsdp2", "plait-ddp", "plait-zero3", "plait-zero3-threads")
"""All with one rank, but for the last one: two ranks, each a thread, on the same device."""
NEAR = 2e-2
"""Losses in bf16 may differ by this share."""
LEAST = 30
"""Seconds without which no contestant is started."""
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Arguments:
    """Measure plait on one GPU, against plain torch and FSDP2."""

    sizes: tuple[Literal["tiny", "1b", "deep", "7b"], ...] = ("1b", "deep", "7b")
    device: str = "cuda"
    rounds: int = 3
    """Rounds of steps of every contestant."""
    steps: int = 6
    """Timed steps of a round."""
    only: tuple[str, ...] = ()
    """Names of contestants; empty: all."""
    deadline: float = 300.0
    """Seconds for a contestant."""
    minutes: float = 0.0
    """Minutes for everything; contestants for which the time does not last are named and left out. 0: no limit."""
    json: Path | None = None
    """The file for every number, written after each contestant."""


def run_contestant(name: str, size: str, arguments: Arguments, seconds_left: float) -> dict[str, Any]:
    """One process: seconds of the steps of each round, losses, memory, or ``error``."""
    command = [sys.executable, str(WORKER), name, size, arguments.device, str(arguments.steps), str(arguments.rounds)]
    limit = min(arguments.deadline, seconds_left)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit:.0f} s"}
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


HEADING = "| contestant | ms per step | of torch | model flops per s | of products alone | peak memory | host waits |"


def compare(
    size: Size, names: Sequence[str], arguments: Arguments, end: float, write: Callable[[dict[str, Any]], None]
) -> bool:
    """Prints a size's table, row by row; True if nothing failed or was left out and all losses agree."""
    found: dict[str, dict[str, Any]] = {}
    print(f"\n## {size.name}: {size.parameters / 1e9:.2f} billion parameters, {size.tokens:,} tokens a step, bf16\n")
    print(f"{HEADING}\n|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        if (left := end - time.monotonic()) < LEAST:
            found[name] = {"error": f"left out: {max(left, 0):.0f} s are left of {arguments.minutes:g} minutes"}
        else:
            found[name] = run_contestant(name, size.name, arguments, left)
        write(found)
        one = found[name]
        text = f"{one['error'][:90]} | | | | |" if "error" in one else row(size, one, found.get("torch", one))
        print(f"| {name} | {text} |", flush=True)
    losses = {name: one["loss"] for name, one in found.items() if "error" not in one}
    first = next(iter(losses.values()), 0.0)
    apart = {name: loss for name, loss in losses.items() if abs(loss / first - 1) > NEAR}
    print(f"LOSSES DISAGREE: {first:.4f}, {apart}" if apart else "losses: all that ran agree", flush=True)
    return len(losses) == len(names) and not apart


def row(size: Size, one: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Median time, its ratio to plain torch's with the range over rounds, share of what products alone reach, memory,
    waits."""
    seconds = statistics.median(second for turn in one["seconds"] for second in turn)
    rate, alone = size.flops / seconds, one["product_rate"]
    ratio = ""
    if "error" not in plain:
        base = statistics.median(second for turn in plain["seconds"] for second in turn)
        ratios = [base / statistics.median(turn) for turn in one["seconds"]]
        ratio = f"{base / seconds:.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
    memory = f"{one['peak_bytes'] / 2**30:.1f} GiB"
    waits = "" if one["waits"] is None else str(one["waits"])
    return f"{seconds * 1e3:.1f} | {ratio} | {rate / 1e12:.1f} T | {rate / alone:.1%} | {memory} | {waits}"


def main(arguments: Arguments) -> int:
    if unknown := set(arguments.only) - set(CONTESTANTS):
        print(f"no contestant {sorted(unknown)[0]!r}: they are {', '.join(CONTESTANTS)}", file=sys.stderr)
        return 2
    import torch

    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("torch sees no CUDA device here: --device cpu --sizes tiny tries the script itself", file=sys.stderr)
        return 2
    names = [name for name in CONTESTANTS if name in arguments.only or not arguments.only]
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else arguments.device
    print(f"{device}, torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps")
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "sizes": {}}
    end = time.monotonic() + 60 * arguments.minutes if arguments.minutes else math.inf
    all_right = True
    for name in arguments.sizes:

        def write(found: dict[str, Any], name: str = name) -> None:
            results["sizes"][name] = found
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")

        all_right &= compare(SIZES[name], names, arguments, end, write)
    return 0 if all_right else 1


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
