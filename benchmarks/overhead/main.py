"""The engine's own time: per unit and step, and per operator, beyond a plain PyTorch loop.

    python benchmarks/overhead/main.py                          # everything, 2 to 3 minutes on 2 cores
    python benchmarks/overhead/main.py --what unit --rounds 21 --json now.json
    python benchmarks/overhead/main.py --before earlier.json    # with a column of what it was

Exit code 1 if contestants that train the same model on the same data disagree about the loss.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import CASES, task
from clock import median
from harness.groups import launch
from harness.report import loss_disagreements, machine
from harness.rows import Row, as_json, ratio_row, value_row

UNIT_GOAL = 50.0
"""Microseconds a unit and step, of zero3 on one rank."""
TWO_RANKS = {
    "plait ddp": 100.0,
    "plait zero1": 100.0,
    "plait zero3": 400.0,
    "plait/shm ddp": 100.0,
    "plait/shm zero1": 100.0,
    "plait/shm zero3": 150.0,
}
"""The goals of ``engine.step`` on two ranks."""
OPERATOR_GOAL = 1.0
"""Microseconds for an operator that no handler sees."""

Results = dict[str, dict[str, dict[str, dict[str, list[float]]]]]
"""Measurement -> case -> row -> clock -> microseconds, a number per round."""


@dataclass(frozen=True)
class Arguments:
    """Measure the cost of plait's engine beyond the arithmetic."""

    what: Literal["unit", "operator", "all"] = "all"
    rounds: int = 5
    """Turns that every contestant gets; the plain loop's time is subtracted inside each."""
    only: str = ""
    """Measure the cases whose name contains this."""
    json: Path | None = None
    """The file for every number, each round's included."""
    before: Path | None = None
    """The --json file of an earlier run, for comparison."""


def goal(what: str, case: str, row: str, rows: dict[str, Any], value: float) -> str:
    """The goal of a plait row, and whether it is met."""
    if not row.startswith("plait"):
        return ""
    limit = limit_of(what, case, row)
    wanted = [] if limit is None else [(f"{limit:g}", limit)]
    if "zero3" in row and "torch FSDP2" in rows:
        wanted.append(("FSDP2's", median(rows["torch FSDP2"]["own"])))
    return "; ".join(f"{name}: {'met' if value <= limit else 'MISSED'}" for name, limit in wanted)


def limit_of(what: str, case: str, row: str) -> float | None:
    """Microseconds that a row of plait may take."""
    if what == "operator":
        return OPERATOR_GOAL
    if case.endswith("2 ranks"):
        return TWO_RANKS.get(row)
    return UNIT_GOAL if "zero3" in row and case.endswith("1 rank") else None


def print_case(what: str, case: str, rows: dict[str, Any], before: dict[str, Any]) -> None:
    unit = "operator" if what == "operator" else "unit and step and microbatch" if "M=" in case else "unit and step"
    earlier = "before | " if before else ""
    print(f"\n### {case}: microseconds per {unit}\n")
    print(f"| row | own thread | lowest - highest | all threads | {earlier}goal |")
    print("|---|---|---|---|---|" + ("---|" if before else ""))
    for row, clocks in rows.items():
        own = clocks["own"]
        value, digits = median(own), 2 if what == "operator" else 1
        was = f"{median(before[row]['own']):.{digits}f} | " if row in before else "| " if before else ""
        label = f"{row} (the whole)" if row.startswith("plain") else row
        print(
            f"| {label} | {value:.{digits}f} | {min(own):.{digits}f} - {max(own):.{digits}f} "
            f"| {median(clocks['all']):.{digits}f} | {was}{goal(what, case, row, rows, value)} |",
            flush=True,
        )


def rows_of(what: str, case: str, rows: dict[str, Any]) -> list[Row]:
    """Microseconds on the thread that trains; our zero3 also against FSDP2."""
    own = {name: clocks["own"] for name, clocks in rows.items()}
    work = f"{case}: beyond a plain loop, per {what}"
    found = []
    for name, values in own.items():
        ours = name.startswith("plait")
        limit = limit_of(what, case, name) if ours else None
        if not name.startswith("plain"):
            found.append(value_row("overhead", work, name, values, "us", limit))
        if ours and "zero3" in name and (peer := own.get("torch FSDP2")):
            found.append(ratio_row("overhead", work, (name, values), ("torch FSDP2", peer), "us", 1.0))
    return found


def main(arguments: Arguments) -> int:
    print(machine())
    before: Results = json.loads(arguments.before.read_text())["results"] if arguments.before else {}
    results: Results = {}
    measured: list[Row] = []
    problems: list[str] = []
    chosen = [c for c in CASES.values() if arguments.what in (c.what, "all") and arguments.only in c.name]
    for mesh, ranks in {case.mesh: case.ranks for case in chosen}.items():
        answers = launch(task, ranks, [case.name for case in chosen if case.mesh == mesh], arguments.rounds)
        for name, answer in answers.items():
            what = CASES[name].what
            results.setdefault(what, {})[name] = answer["rows"]
            print_case(what, name, answer["rows"], before.get(what, {}).get(name, {}))
            measured += rows_of(what, name, answer["rows"])
            problems += [f"{name}: {line}" for line in _disagreements(answer["losses"])]
        if arguments.json is not None:  # after each mesh, so that those are there if a later one is stopped
            text = {"machine": machine(), "rounds": arguments.rounds, "rows": as_json(measured), "results": results}
            arguments.json.write_text(json.dumps(text, indent=1) + "\n")
    print("\n" + ("\n".join(problems) if problems else "losses: all contestants agree"))
    return 1 if problems else 0


def _disagreements(losses: dict[str, list[float]]) -> list[str]:
    """Compares the losses of models with operators, and separately of those without."""
    without = {name: values for name, values in losses.items() if name.endswith(", False")}
    others = {name: values for name, values in losses.items() if name not in without}
    return [line for group in (others, without) if group for line in loss_disagreements(group, [])]


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
