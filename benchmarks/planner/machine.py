"""Judges ``plait plan`` on this machine: calibrates it, predicts layouts of a small decoder, and runs each of them.

    python benchmarks/planner/machine.py --out FILE.json        # twenty minutes on two idle cores
    python benchmarks/planner/machine.py --again FILE.json      # predicts anew what that file measured, runs nothing

Two ranks over shared memory and over gloo, and four over shared memory: for each, ``plait doctor --calibrate`` writes
a cluster file.  Files and runs take turns in several rounds, and a row has their medians: the same run takes up to a
fifth longer a minute later on a rented machine.  Run it while nothing else runs: the load is written with the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.console import Console

from plait.predict.cluster import Cluster, parse_cluster
from plait.predict.plan import Plan, implementation
from plait.predict.search import Candidate
from plait.run.commands.plan import PlanConfig, read_model, to_config
from plait.run.measure.layouts import MeasuredPlan, ShortRun, errors_text, measure_layout, measured_table
from plait.table.cells import TABLE
from plait.table.mesh import Mesh

ASKED = PlanConfig(
    model="gpt", layers=4, width=128, ffn=352, heads=4, kv_heads=2, vocab=256, batch=16, length=128, dtype="fp32"
)
WORLDS = {
    # ranks, world -> mesh, row, microbatches, order
    (2, "shared_memory"): (
        ("shard=2", "ddp", 1, None), ("shard=2", "zero1", 1, None), ("shard=2", "zero2", 2, None),
        ("shard=2", "zero3", 1, None), ("shard=2", "zero3", 4, None), ("tensor=2", "ddp", 1, None),
        ("pipe=2", "ddp", 4, "1f1b"), ("pipe=2", "ddp", 8, "1f1b"), ("pipe=2", "ddp", 4, "gpipe"),
    ),
    (2, "process"): (
        ("shard=2", "ddp", 1, None), ("shard=2", "zero3", 1, None), ("tensor=2", "ddp", 1, None),
        ("pipe=2", "ddp", 4, "1f1b"),
    ),
    (4, "shared_memory"): (
        ("shard=4", "ddp", 1, None), ("shard=4", "zero3", 1, None), ("replica=2 shard=2", "hsdp", 1, None),
        ("shard=2 tensor=2", "zero3", 1, None), ("pipe=2 shard=2", "zero3", 4, "1f1b"), ("pipe=4", "ddp", 8, "1f1b"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """Judge plait's planner on this machine."""

    rounds: int = 3
    """Rounds; each calibrates every world and runs every layout once."""
    out: Path | None = None
    """Write the clusters and the rows here as JSON."""
    again: Path | None = None
    """Predict anew the rows of such a file, from its clusters and its measured figures."""


def calibrated(ranks: int, world: str) -> str:
    """The text of a cluster file: this machine as so many ranks of a world see it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.toml"
        words = ["doctor", "--calibrate", str(file), "--mesh", f"shard={ranks}", "--world", world, "--device", "cpu"]
        subprocess.run([sys.executable, "-m", "plait", *words], check=True, stdout=subprocess.DEVNULL)
        return file.read_text()


def plans(cluster: Cluster, rows: tuple[tuple[str, str, int, str | None], ...]) -> Iterator[Plan]:
    """The layouts of the small decoder."""
    model = read_model(ASKED)
    for mesh, row, microbatches, order in rows:
        yield Plan(
            model, cluster, Mesh.parse(mesh), TABLE[row], ASKED.batch or 0, ASKED.length, microbatches, order,
            dtype="fp32", **implementation(model, cluster),
        )  # fmt: skip


def predicted(group: dict[str, Any]) -> list[Candidate]:
    """The layouts of a world, each with the median prediction of the rounds' cluster files."""
    rounds = [
        list(plans(parse_cluster(text, group["world"]), WORLDS[group["ranks"], group["world"]]))
        for text in group["clusters"]
    ]
    every = [sorted(map(Candidate.of, same), key=lambda one: one.duration.total) for same in zip(*rounds, strict=True)]
    return [same[len(same) // 2] for same in every]


def measured(rounds: int) -> Iterator[dict[str, Any]]:
    """The cluster files and the short runs of each world, round by round."""
    groups = [{"ranks": ranks, "world": world, "clusters": [], "rounds": []} for ranks, world in WORLDS]
    for _ in range(rounds):
        for group in groups:
            text = calibrated(group["ranks"], group["world"])
            asked = plans(parse_cluster(text, group["world"]), WORLDS[group["ranks"], group["world"]])
            group["clusters"].append(text)
            group["rounds"].append([measure_layout(to_config(ASKED, one)) for one in asked])
            group["load"] = os.getloadavg()[0]
    return iter(groups)


def main(arguments: Arguments) -> None:
    console, groups = Console(width=120), []
    for group in measured(arguments.rounds) if arguments.again is None else json.loads(arguments.again.read_text()):
        runs = [ShortRun(median(run[0] for run in same), *same[0][1:]) for same in zip(*group["rounds"], strict=True)]
        found = [MeasuredPlan(said, run) for said, run in zip(predicted(group), runs, strict=True)]
        console.print(f"{group['ranks']} ranks, {group['world']}; load {group['load']:.1f} on {os.cpu_count()} cores")
        console.print(measured_table(found))
        console.print(errors_text(found))
        groups.append(group | {"said": [one.as_json() for one in found]})
    errors = [abs(row["seconds"][0] / row["seconds"][1] - 1) for group in groups for row in group["said"]]
    console.print(f"{len(errors)} layouts, mean error {sum(errors) / len(errors):.1%} (goal: at most 8 %)")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(groups, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
