"""Times a step without a witness, and the same step under one.

    python benchmarks/witness/main.py                              # everything, about 5 minutes on 2 cores
    python benchmarks/witness/main.py --model mlp1024 --engine ddp --rounds 15
    python benchmarks/witness/main.py --profile whole --engine single

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
from contestants import ENGINES, RECORDINGS, WORKLOADS, Witnessed, contestant
from harness.groups import launch
from harness.models import Batch
from harness.report import loss_disagreements, machine
from harness.turns import Spread, checked_losses, no_collection, over_ranks, profiled, ratios, rotated

CLOCKS = ("wall", "cpu", "inside")
"""A step by the wall's clock on the slowest rank; the processors' time of all ranks; that of it inside the witness."""


@dataclass(frozen=True)
class Arguments:
    """Measure the cost of a witness on this machine."""

    model: Literal["gpt256", "mlp1024", "all"] = "all"
    engine: Literal["single", "ddp", "fsdp2", "all"] = "all"
    rounds: int = 15
    """Turns that every recording gets; a ratio is formed inside each."""
    folder: Path | None = None
    """The folder of the witnesses; None: a temporary folder."""
    json: Path | None = None
    """The file for every number, each round's included."""
    profile: Literal["", "none", "whole"] = ""
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
    clocks: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in run} for clock in CLOCKS}
    written: dict[str, int] = {}
    for turn in range(rounds):
        for name in rotated(list(run), turn):
            for clock, value in zip(CLOCKS, measured(run[name], batches, workload.steps_per_round), strict=True):
                clocks[clock][name].append(value)
            written[name] = run[name].clean()
    return {"seconds": clocks, "bytes": written, "losses": losses}


def measured(one: Witnessed, batches: Sequence[Batch], num_steps: int) -> tuple[float, float, float]:
    """Mean seconds of a step by each of the clocks."""
    one.contestant.step(batches[0])  # brings this contestant's weights back into the cache
    with no_collection():
        dist.barrier()
        wall, cpu, inside = time.perf_counter(), time.process_time(), one.inside
        for step in range(num_steps):
            one.contestant.step(batches[step % len(batches)])
        wall, cpu, inside = time.perf_counter() - wall, time.process_time() - cpu, one.inside - inside
    return (
        over_ranks(wall / num_steps, dist.ReduceOp.MAX),
        over_ranks(cpu / num_steps, dist.ReduceOp.SUM),
        over_ranks(inside / num_steps, dist.ReduceOp.SUM),
    )


def print_case(answer: dict[str, Any]) -> None:
    print("| recording | wall ms | beside none | cpu ms | beside none | inside ms | 1 + inside / rest | KiB |")
    print("|---|---|---|---|---|---|---|---|")
    wall, cpu, inside = (answer["seconds"][clock] for clock in CLOCKS)
    for name in RECORDINGS:
        cells = []
        for seconds in (wall, cpu):
            beside = ratios(seconds[name], seconds["none"])
            cells.append(f"{1e3 * Spread.of(seconds[name]).median:.1f}")
            cells.append(f"{beside.median:.3f} ({beside.low:.2f} - {beside.high:.2f})")
        share = Spread.of([1 + own / (all_ - own) for own, all_ in zip(inside[name], cpu[name], strict=True)])
        cells.append(f"{1e3 * Spread.of(inside[name]).median:.2f}")
        cells.append(f"{share.median:.3f} ({share.low:.3f} - {share.high:.3f})")
        print(f"| {name} | {' | '.join(cells)} | {answer['bytes'][name] / 1024:,.0f} |", flush=True)


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
