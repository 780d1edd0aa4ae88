"""What a witness costs: a step without one, under one that keeps a few elements, and under one that keeps everything.

    python benchmarks/witness/main.py                              # everything, about 5 minutes on 2 cores
    python benchmarks/witness/main.py --model mlp1024 --engine ddp --rounds 15
    python benchmarks/witness/main.py --profile elements --engine single

Exit code 1 if contestants that train the same model on the same data disagree about the loss.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist
from contestants import ENGINES, RECORDINGS, WORKLOADS, contestant
from harness.groups import launch
from harness.report import loss_disagreements, machine
from harness.turns import Spread, checked_losses, interleave, profiled, ratios, rotated

GOAL = 1.10
"""A step under a witness of a few elements, beside one without."""


@dataclass(frozen=True)
class Arguments:
    """Measure what a witness costs on this machine."""

    model: Literal["gpt256", "mlp1024", "all"] = "all"
    engine: Literal["single", "ddp", "fsdp2", "all"] = "all"
    rounds: int = 9
    """Turns that every recording gets; a ratio is formed inside each."""
    folder: Path | None = None
    """Where witnesses write; None: a temporary folder."""
    json: Path | None = None
    """Where to write every number, each round's included."""
    profile: Literal["", "none", "elements", "whole"] = ""
    """Print torch.profiler's table of its steps on rank 0 instead."""


def task(model: str, engine: str, rounds: int, folder: str, profile: str) -> dict[str, Any]:
    """On every rank: the seconds of a step under each recording, the bytes that it writes, and the losses."""
    workload = WORKLOADS[model]
    batches = [workload.batch(step, dist.get_rank(), dist.get_world_size()) for step in range(4)]
    if profile:
        made = contestant(workload, engine, profile, folder)
        return {"profile": profiled(made.contestant, batches[0], workload.steps_per_round, None)}
    run = {name: contestant(workload, engine, name, folder) for name in RECORDINGS}
    losses = {name: checked_losses(one.contestant, batches) for name, one in run.items()}
    seconds: dict[str, list[float]] = {name: [] for name in run}
    written: dict[str, int] = {}
    for turn in range(rounds):
        for name in rotated(list(run), turn):
            found = interleave({name: run[name].contestant}, batches, 1, workload.steps_per_round)
            seconds[name] += found[name]
            written[name] = run[name].clean()
    return {"seconds": seconds, "bytes": written, "losses": losses}


def print_case(answer: dict[str, Any]) -> None:
    seconds = answer["seconds"]
    print("| recording | ms a step | lowest - highest | beside none | lowest - highest | KiB a step and rank | goal |")
    print("|---|---|---|---|---|---|---|")
    for name, values in seconds.items():
        ms, beside = Spread.of([1e3 * value for value in values]), ratios(values, seconds["none"])
        goal = f"{GOAL:.2f}: {'met' if beside.median <= GOAL else 'MISSED'}" if name == "elements" else ""
        print(
            f"| {name} | {ms.median:.1f} | {ms.low:.1f} - {ms.high:.1f} | {beside.median:.3f} "
            f"| {beside.low:.3f} - {beside.high:.3f} | {answer['bytes'][name] / 1024:,.0f} | {goal} |",
            flush=True,
        )


def main(arguments: Arguments) -> int:
    print(machine())
    results, problems = {}, []
    for model in WORKLOADS if arguments.model == "all" else [arguments.model]:
        for engine in ENGINES if arguments.engine == "all" else [arguments.engine]:
            ranks = ENGINES[engine][1]
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                answer = launch(task, ranks, model, engine, arguments.rounds, folder, arguments.profile)
            print(f"\n### {model}, {engine}, {ranks} rank{'s' * (ranks > 1)}\n")
            if arguments.profile:
                print(answer["profile"])
                continue
            print_case(answer)
            results[f"{model}, {engine}"] = answer
            problems += [f"{model}, {engine}: {line}" for line in loss_disagreements(answer["losses"], [])]
    if not arguments.profile:
        print("\n" + ("\n".join(problems) if problems else "losses: all agree"))
    if arguments.json is not None:
        text = json.dumps({"machine": machine(), "rounds": arguments.rounds, "results": results}, indent=1)
        arguments.json.write_text(text + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
