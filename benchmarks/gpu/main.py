"""One GPU in one go: decoders under plain torch, FSDP2 and plait; ranks as threads; what stops the host in a step.

    python benchmarks/gpu/main.py                          # a 1 B and a 7 B decoder: some minutes on an 80 GB GPU
    python benchmarks/gpu/main.py --sizes 1b --json gpu.json
    python benchmarks/gpu/main.py --device cpu --sizes tiny  # tries the script itself, where there is no GPU

Every contestant of a size has a process of its own, for memory; they take turns, round by round.  Exit code 1 if one of
them fails, or if their losses disagree.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Arguments:
    """Measure plait on one GPU, beside plain torch and FSDP2."""

    sizes: tuple[Literal["tiny", "1b", "7b"], ...] = ("1b", "7b")
    device: str = "cuda"
    rounds: int = 3
    """Turns of every contestant."""
    steps: int = 6
    """Timed steps of a turn, behind three that are not."""
    only: tuple[str, ...] = ()
    """Names of contestants; empty: all."""
    deadline: float = 600.0
    """Seconds for a turn."""
    json: Path | None = None
    """Where to write every number."""


def turn(name: str, size: str, arguments: Arguments) -> dict[str, Any]:
    """One process: its step times, its losses, its memory, or ``error``."""
    command = [sys.executable, str(WORKER), name, size, arguments.device, str(arguments.steps)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=arguments.deadline)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {arguments.deadline:g} s"}
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def compare(size: Size, names: Sequence[str], arguments: Arguments) -> tuple[dict[str, list[dict[str, Any]]], bool]:
    """All turns of a size, its table, and whether nothing failed and all losses agree."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            turns[name].append(turn(name, size.name, arguments))
    print(f"\n## {size.name}: {size.parameters / 1e9:.2f} billion parameters, {size.tokens:,} tokens a step, bf16\n")
    print("| contestant | ms per step | of torch | model flops per s | of products alone | peak memory | host waits |")
    print("|---|---|---|---|---|---|---|")
    right, told = True, list[str]()
    for name, of_name in turns.items():
        if errors := [one["error"] for one in of_name if "error" in one]:
            print(f"| {name} | failed: {errors[0][:90]} | | | | | |")
            right = False
            continue
        print(f"| {name} | {row(size, of_name, turns.get('torch', []))} |")
        first = turns[names[0]][0]
        if "error" not in first and abs(of_name[0]["loss"] / first["loss"] - 1) > NEAR:
            told.append(f"LOSSES DISAGREE: {name} {of_name[0]['loss']:.4f}, {names[0]} {first['loss']:.4f}")
    print("\n".join(told) if told else "losses: all that ran agree", flush=True)
    return turns, right and not told


def row(size: Size, turns: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> str:
    """Median time, ratio inside a round, share of what products alone reach, memory, waits."""
    seconds = statistics.median(second for one in turns for second in one["seconds"])
    pairs = [
        statistics.median(b["seconds"]) / statistics.median(a["seconds"])
        for a, b in zip(turns, plain, strict=False)
        if "error" not in b
    ]
    rate, alone = size.flops / seconds, statistics.median(one["product_rate"] for one in turns)
    ratio = f"{statistics.median(pairs):.2f} ({min(pairs):.2f} - {max(pairs):.2f})" if pairs else ""
    memory = f"{max(one['peak_bytes'] for one in turns) / 2**30:.1f} GiB"
    waits = "" if turns[0]["waits"] is None else str(turns[0]["waits"])
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
    all_right = True
    for name in arguments.sizes:
        results["sizes"][name], right = compare(SIZES[name], names, arguments)
        all_right &= right
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all_right else 1


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
