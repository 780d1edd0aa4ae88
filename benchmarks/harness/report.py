"""The measurements as Markdown tables, ready for a README; the check that all trained the same model."""

from __future__ import annotations

import datetime
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.turns import Spread, ratios

LOSS_TOLERANCE = 1e-4
"""Relative. Engines add in different orders, and Adam turns the rounding of tiny gradients into steps."""


def machine() -> str:
    """The machine, the versions and the time."""
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


@dataclass(frozen=True)
class Match:
    """A row of ours, the peers it meets (the fastest of them counts) and the ratio we want per workload."""

    row: str
    peers: tuple[str, ...]
    goal: dict[str, float]
    against: str = ""
    """Words for the peers, where there are several."""
    title: str = ""
    """Words for the row, where it was chosen among several."""


def best_peer(match: Match, seconds: dict[str, list[float]]) -> str | None:
    """The fastest of the peers that a row meets, by median: the hardest comparison."""
    present = [peer for peer in match.peers if peer in seconds]
    return min(present, key=lambda peer: statistics.median(seconds[peer]), default=None)


def print_times(model: str, seconds: dict[str, list[float]], matches: Sequence[Match]) -> None:
    """Milliseconds per step of all, then the ratios of ours."""
    print("\n| contestant | ms per step | min - max |\n|---|---|---|")
    for name, values in seconds.items():
        ms = Spread.of([1e3 * value for value in values])
        print(f"| {name} | {ms.median:.1f} | {ms.low:.1f} - {ms.high:.1f} |")
    lines: dict[tuple[str, str, bool], str] = {}  # a pair that meets twice has one line
    for match in matches:
        peer = best_peer(match, seconds)
        if match.row in seconds and peer is not None:
            ratio = ratios(seconds[peer], seconds[match.row])
            goal = match.goal.get(model)
            verdict = "" if goal is None else f"{goal:.2f}: {'met' if ratio.median >= goal else 'MISSED'}"
            spread = f"{ratio.median:.2f} | {ratio.low:.2f} - {ratio.high:.2f}"
            lines[match.row, peer, goal is not None] = f"| {match.row} | {peer} | {spread} | {verdict} |"
    if lines:
        print(
            "\n| row | against | times faster | min - max | goal |\n|---|---|---|---|---|\n" + "\n".join(lines.values())
        )
    print()


def passes_table(title: str, found: dict[str, Any], peer: str) -> str:
    """Times, bytes and errors of a forward and backward; ratios are to the fastest whose name begins with ``peer``."""
    fastest = min((n for n in found["seconds"] if n.startswith(peer)), key=lambda n: min(found["seconds"][n]))
    lines = [f"\n## {title}\n"]
    lines.append(f"| contestant | processor, ms | clock, ms | sent per rank | error | times as fast as {fastest} |")
    lines.append("|---|---|---|---|---|---|")
    for name, values in found["seconds"].items():
        ms, clock = (Spread.of([1e3 * one for one in of]) for of in (values, found["clocks"][name]))
        ratio = ratios(found["seconds"][fastest], values)
        sent = f"{found['sent'][name] / 2**20:.2f} MiB" if name in found["sent"] else ""
        error = f"{found['errors'][name]:.0e}" if name in found["errors"] else ""
        spread = f"{ratio.median:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"
        times = " | ".join(f"{one.median:.1f} ({one.low:.1f} - {one.high:.1f})" for one in (ms, clock))
        lines.append(f"| {name} | {times} | {sent} | {error} | {spread} |")
    return "\n".join(lines)


def chosen(known: Sequence[str], only: Iterable[str]) -> list[str]:
    """The names to run, in the order of ``known``; none named: all. Leaves the program at one that is unknown."""
    only = tuple(only)
    unknown = [name for name in only if name not in known]
    if unknown:
        print(f"no contestant is called {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        raise SystemExit(2)
    return [name for name in known if not only or name in only]
