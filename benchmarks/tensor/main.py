"""Times plait's tensor parallelism against torch's: a training step, and one small operator.

    python benchmarks/tensor/main.py --what step --model both --json results.json
    python benchmarks/tensor/main.py --what step --ranks 4 --only torch-titan plait-sequence
    python benchmarks/tensor/main.py --what step --profile plait-tensor
    python benchmarks/tensor/main.py --what dispatch

Exit code 1 if contestants that train the same model on the same data disagree about the loss, or if an operator's
result is wrong or needed a message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from dispatch import dispatch_rows, dispatch_task, print_dispatch
from harness.arguments import StepArguments
from harness.contestants import Build
from harness.groups import launch
from harness.report import chosen, loss_disagreements, machine, print_times
from harness.rows import as_json, step_rows
from harness.turns import checked_losses, interleave, profiled
from models import WORKLOADS
from ours import matches, rows
from peers import peers

NUM_BATCHES = 4


@dataclass(frozen=True)
class Arguments(StepArguments):
    """Compare plait's tensor parallelism with torch's on this machine."""

    model: Literal["gpt256", "gpt512", "mlp16", "both"] = "gpt256"  # type: ignore[assignment]
    """both: mlp16 and gpt256."""
    what: Literal["step", "dispatch"] = "step"
    repeats: int = 300
    """Calls of an operator in one turn."""

    @property
    def models(self) -> tuple[str, ...]:
        return ("mlp16", "gpt256") if self.model == "both" else (self.model,)


def contestants(model: str) -> dict[str, Build]:
    return {**peers(model), **rows(model)[0]}


def named(arguments: Arguments, only: Sequence[str]) -> dict[str, list[str]]:
    """The contestants of each workload; leaves the program at one that no workload has."""
    every = {model: list(contestants(model)) for model in arguments.models}
    found = set(chosen(list(dict.fromkeys(name for names in every.values() for name in names)), only))
    return {model: [name for name in names if name in found] for model, names in every.items()}


def step_task(model: str, names: list[str], num_rounds: int) -> dict[str, Any]:
    """On every rank: build all contestants, check their losses, let them take turns; all read the whole batch."""
    workload = WORKLOADS[model]
    batches = [workload.batch(step, 0, 1) for step in range(NUM_BATCHES)]
    builds = contestants(model)
    built = {name: builds[name](workload, dist.get_world_size()) for name in names}
    losses = {name: checked_losses(contestant, batches) for name, contestant in built.items()}
    seconds = interleave(built, batches, num_rounds, workload.steps_per_round)
    return {"losses": losses, "seconds": seconds}


def profile_task(model: str, name: str, out: Path | None) -> str:
    workload = WORKLOADS[model]
    contestant = contestants(model)[name](workload, dist.get_world_size())
    table = profiled(contestant, workload.batch(0, 0, 1), workload.steps_per_round, out)
    return f"{workload.name}, {name}: {table}"


def write_json(arguments: Arguments, result: dict[str, Any]) -> None:
    """Every number; after each workload, so that those of the earlier are there if a later one is stopped."""
    if arguments.json is not None:
        asked = {"what": arguments.what, "model": arguments.model, "ranks": arguments.ranks}
        others = {name: found for name, found in result.items() if name != "rows"}
        text = {"machine": machine(), **asked, "rows": result["rows"], "result": others}
        arguments.json.write_text(json.dumps(text, indent=1) + "\n")


def step(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Measures the training step; returns every number, and the faults."""
    names = named(arguments, arguments.only)
    results: dict[str, Any] = {"rows": []}
    problems = []
    for model in arguments.models:
        if reason := rows(model)[1]:
            print(f"plait's rows are left out: {reason}")
        print(f"\n## {model}, {arguments.ranks} ranks", flush=True)
        result = launch(step_task, arguments.ranks, model, names[model], arguments.rounds)
        pairs = matches(model, arguments.ranks)
        print_times(model, result["seconds"], pairs)
        results["rows"] += as_json(step_rows("tensor", model, arguments.ranks, result["seconds"], pairs))
        if arguments.verbose:
            for name, losses in result["losses"].items():
                print(f"  {name:24} " + "  ".join(f"{loss:.7f}" for loss in losses))
        found = loss_disagreements(result["losses"], [])
        if not found:
            print("losses: all contestants agree")
        problems += [f"{model}: {line}" for line in found]
        results[model] = result
        write_json(arguments, results)
    return results, problems


def dispatch(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Measures small operators; returns every number, and the faults."""
    print(f"\n## dispatch, {arguments.ranks} ranks", flush=True)
    microseconds, problems = launch(dispatch_task, arguments.ranks, arguments.rounds, arguments.repeats)
    print_dispatch(microseconds)
    return {**microseconds, "rows": as_json(dispatch_rows(microseconds, arguments.ranks))}, problems


def main(arguments: Arguments) -> int:
    if arguments.profile:
        chosen_of = named(arguments, (arguments.profile,))
        out = arguments.profile_out
        text = "\n".join(
            launch(profile_task, arguments.ranks, model, name, out) for model, of in chosen_of.items() for name in of
        )
        print(text)
        if arguments.profile_out is not None:
            arguments.profile_out.write_text(text + "\n")
        return 0
    print(machine())
    result, problems = {"step": step, "dispatch": dispatch}[arguments.what](arguments)
    if problems:
        print("\n".join(problems))
    write_json(arguments, result)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
