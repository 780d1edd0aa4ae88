"""The measurements as Markdown tables, ready for the README; the check that all trained the same model."""

from __future__ import annotations

import datetime
import os
import statistics
from pathlib import Path

import torch
from measure import Spread, ratios
from ours import MATCHES, Match

LOSS_TOLERANCE = 1e-4
"""Relative. Engines add in different orders, and Adam turns the rounding of tiny gradients into steps."""


def machine() -> str:
    """What ran this, and when."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "unknown processor")
    cores = len(os.sched_getaffinity(0))
    software = f"torch {torch.__version__}, gloo, 1 thread per rank"
    return f"{processor}, {cores} cores, {software}, {datetime.date.today()}"


def loss_disagreements(losses: dict[str, list[float]], alone: list[str]) -> list[str]:
    """A loud line per contestant whose losses leave the median; those that never talk owe only the first."""
    problems = []
    talking = [name for name in losses if name not in alone] or list(losses)
    for step in range(len(losses[talking[0]])):
        reference = statistics.median(losses[name][step] for name in talking)
        for name in losses if step == 0 else talking:
            error = abs(losses[name][step] - reference) / abs(reference)
            if not error <= LOSS_TOLERANCE:  # also catches nan
                problems.append(
                    f"!!! LOSSES DISAGREE at step {step}: {name} {losses[name][step]:.8g}, the others "
                    f"{reference:.8g} (relative error {error:.1e}, tolerance {LOSS_TOLERANCE:.0e}); "
                    f"its time means nothing !!!"
                )
    return problems


def best_peer(match: Match, seconds: dict[str, list[float]]) -> str | None:
    """The fastest of the peers that a row meets, by median: the hardest comparison."""
    present = [peer for peer in match.peers if peer in seconds]
    return min(present, key=lambda peer: statistics.median(seconds[peer]), default=None)


def print_times(model: str, seconds: dict[str, list[float]]) -> None:
    """Milliseconds per step of all, then the ratios of ours."""
    print("\n| contestant | ms per step | min - max |\n|---|---|---|")
    for name, values in seconds.items():
        ms = Spread.of([1e3 * value for value in values])
        print(f"| {name} | {ms.median:.1f} | {ms.low:.1f} - {ms.high:.1f} |")
    lines = []
    for match in MATCHES:
        peer = best_peer(match, seconds)
        if match.row in seconds and peer is not None:
            ratio = ratios(seconds[peer], seconds[match.row])
            goal = match.goal.get(model)
            verdict = "" if goal is None else f"{goal:.2f}: {'met' if ratio.median >= goal else 'MISSED'}"
            spread = f"{ratio.median:.2f} | {ratio.low:.2f} - {ratio.high:.2f}"
            lines.append(f"| {match.row} | {peer} | {spread} | {verdict} |")
    if lines:
        print("\n| row | against | times faster | min - max | goal |\n|---|---|---|---|---|\n" + "\n".join(lines))
    print()


def print_memory(memory: dict[str, dict[str, float]]) -> None:
    """MiB above the bare process group, the larger rank's."""
    print("\n| contestant | peak PSS, MiB | peak RSS (kernel), MiB | between steps, PSS |\n|---|---|---|---|")
    for name, row in memory.items():
        print(f"| {name} | {row['peak_pss']:.0f} | {row['peak_rss']:.0f} | {row['resting_pss']:.0f} |")
    if "plait-zero3" in memory and "fsdp2" in memory:
        ours, theirs = memory["plait-zero3"]["peak_pss"], memory["fsdp2"]["peak_pss"]
        verdict = "met" if ours <= theirs else "MISSED"
        print(f"\npeak of plait-zero3 / fsdp2: {ours / theirs:.2f} (goal <= 1: {verdict})")
