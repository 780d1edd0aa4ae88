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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist
from contestants import ENGINES, RECORDINGS, WORKLOADS, contestant
from harness.contestants import Contestant
from harness.groups import launch
from harness.models import Batch
from harness.report import loss_disagreements, machine
from harness.turns import Spread, checked_losses, no_collection, over_ranks, profiled, ratios, rotated

GOAL = 1.10
"""A step under a witness of a few elements, beside one without."""


@dataclass(frozen=True)
class Arguments:
    """Measure what a witness costs on this machine."""

    model: Literal["gpt256", "mlp1024", "all"] = "all"
    engine: Literal["single", "ddp", "fsdp2", "all"] = "all"
    rounds: int = 15
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
    clocks: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in run} for clock in ("wall", "cpu")}
    written: dict[str, int] = {}
    for turn in range(rounds):
        for name in rotated(list(run), turn):
            wall, cpu = measured(run[name].contestant, batches, workload.steps_per_round)
            clocks["wall"][name].append(wall)
            clocks["cpu"][name].append(cpu)
            written[name] = run[name].clean()
    return {"seconds": clocks, "bytes": written, "losses": losses}


def measured(contestant: Contestant, batches: Sequence[Batch], num_steps: int) -> tuple[float, float]:
    """Mean seconds of a step: by the wall's clock on the slowest rank, and of the processors over all ranks."""
    contestant.step(batches[0])  # brings this contestant's weights back into the cache
    with no_collection():
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(num_steps):
            contestant.step(batches[step % len(batches)])
        wall, cpu = (time.perf_counter() - wall) / num_steps, (time.process_time() - cpu) / num_steps
    return over_ranks(wall, dist.ReduceOp.MAX), over_ranks(cpu, dist.ReduceOp.SUM)


def print_case(answer: dict[str, Any]) -> None:
    print(
        "| recording | clock | ms a step | lowest - highest | beside none | lowest - highest | KiB a step, rank | goal |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in RECORDINGS:
        for clock, seconds in answer["seconds"].items():
            ms, beside = Spread.of([1e3 * value for value in seconds[name]]), ratios(seconds[name], seconds["none"])
            goal = f"{GOAL:.2f}: {'met' if beside.median <= GOAL else 'MISSED'}" if name == "elements" else ""
            print(
                f"| {name} | {clock} | {ms.median:.1f} | {ms.low:.1f} - {ms.high:.1f} | {beside.median:.3f} "
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
