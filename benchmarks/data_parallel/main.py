"""plait's data-parallel rows against torch's, one step at a time, in one interleaved run.

    python benchmarks/data_parallel/main.py --model all --json results.json
    python benchmarks/data_parallel/main.py --model mlp4 --only ddp fsdp2 plait-zero3 --no-memory
    python benchmarks/data_parallel/main.py --model gpt256 --profile plait-zero3

Exit code 1 if contestants that train the same model on the same data disagree about the loss.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.contestants import Build
from harness.groups import launch
from harness.models import Workload
from harness.report import chosen, loss_disagreements, machine, print_times
from harness.rows import as_json, ratio_row, step_rows, value_row
from harness.turns import checked_losses, interleave, profiled
from measure import memory_mebibytes
from models import WORKLOADS
from ours import MATCHES, rows
from peers import PEERS
from report import print_memory

NUM_BATCHES = 4


@dataclass(frozen=True)
class Arguments:
    """Compare plait's data-parallel rows with torch's on this machine."""

    model: Literal["mlp4", "mlp16", "gpt256", "all"] = "all"
    rounds: int = 5
    """Turns that every contestant gets; a ratio is formed inside each."""
    ranks: int = 2
    only: tuple[str, ...] = ()
    """Names of the contestants to run; empty: all."""
    memory: bool = True
    """Measure peak memory too, in a process group per contestant."""
    json: Path | None = None
    """The file for every number, each round's included."""
    profile: str = ""
    """Name of one contestant: print torch.profiler's table of its steps on rank 0 instead."""
    profile_out: Path | None = None
    """The table's file; a Chrome trace next to it has the same name ending in .trace.json."""
    suite: str = "data_parallel"
    """The name of the suite in the rows of ``json``."""
    verbose: bool = field(default=False)
    """Print the losses of every contestant."""


def contestants() -> dict[str, Build]:
    return {**PEERS, **rows()[0]}


def time_task(model: str, names: list[str], num_rounds: int) -> dict[str, Any]:
    """On every rank: build all contestants, check their losses, let them take turns."""
    workload = WORKLOADS[model]
    ranks = dist.get_world_size()
    batches = [workload.batch(step, dist.get_rank(), ranks) for step in range(NUM_BATCHES)]
    builds = contestants()
    built = {name: builds[name](workload, ranks) for name in names}
    losses = {name: checked_losses(contestant, batches) for name, contestant in built.items()}
    seconds = interleave(built, batches, num_rounds, workload.steps_per_round)
    alone = [name for name, contestant in built.items() if not contestant.communicates]
    return {"losses": losses, "seconds": seconds, "alone": alone}


def memory_task(model: str, name: str) -> dict[str, float]:
    workload = WORKLOADS[model]
    ranks = dist.get_world_size()
    batches = [workload.batch(step, dist.get_rank(), ranks) for step in range(NUM_BATCHES)]
    return memory_mebibytes(contestants()[name], workload, batches)


def profile_task(model: str, name: str, out: Path | None) -> str:
    workload = WORKLOADS[model]
    ranks = dist.get_world_size()
    batch = workload.batch(0, dist.get_rank(), ranks)
    contestant = contestants()[name](workload, ranks)
    return f"{workload.name}, {name}: {profiled(contestant, batch, workload.steps_per_round, out)}"


def compare(workload: Workload, names: list[str], arguments: Arguments) -> tuple[dict[str, Any], bool]:
    """One workload: times, losses, memory. Returns every number and whether the losses agree."""
    print(f"\n## {workload.name}, {arguments.ranks} ranks", flush=True)
    result = launch(time_task, arguments.ranks, workload.name, names, arguments.rounds)
    print_times(workload.name, result["seconds"], MATCHES)
    rows = step_rows(arguments.suite, workload.name, arguments.ranks, result["seconds"], MATCHES)
    if arguments.verbose:
        for name, losses in result["losses"].items():
            print(f"  {name:24} " + "  ".join(f"{loss:.7f}" for loss in losses))
    problems = loss_disagreements(result["losses"], result["alone"])
    print("\n".join(problems) if problems else "losses: all contestants agree", flush=True)
    if arguments.memory:
        result["memory"] = {name: launch(memory_task, arguments.ranks, workload.name, name) for name in names}
        print_memory(result["memory"])
        work = f"peak memory, {workload.name}, {arguments.ranks} ranks"
        peaks = {name: [found["peak_pss"]] for name, found in result["memory"].items()}
        rows += [value_row(arguments.suite, work, name, peak, "MiB") for name, peak in peaks.items()]
        if {"plait-zero3", "fsdp2"} <= peaks.keys():
            pair = [(name, peaks[name]) for name in ("plait-zero3", "fsdp2")]
            rows.append(ratio_row(arguments.suite, work, *pair, "MiB", 1.0))
    result["rows"] = as_json(rows)
    return result, not problems


def main(arguments: Arguments) -> int:
    reason = rows()[1]
    if reason:
        print(f"plait's rows are left out: {reason}")
    models = list(WORKLOADS) if arguments.model == "all" else [arguments.model]
    if arguments.profile:
        chosen(list(contestants()), (arguments.profile,))
        tables = [launch(profile_task, arguments.ranks, m, arguments.profile, arguments.profile_out) for m in models]
        text = "\n".join(tables)
        print(text)
        if arguments.profile_out is not None:
            arguments.profile_out.write_text(text + "\n")
        return 0
    names = chosen(list(contestants()), arguments.only)
    print(machine())
    results: dict[str, Any] = {"machine": machine(), "ranks": arguments.ranks, "rows": [], "models": {}}
    all_agree = True
    for model in models:
        results["models"][model], agree = compare(WORKLOADS[model], names, arguments)
        results["rows"] += results["models"][model].pop("rows")
        all_agree &= agree
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all_agree else 1


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
