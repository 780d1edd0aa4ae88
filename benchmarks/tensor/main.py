"""plait's tensor parallelism against torch's: a training step, and what one small operator costs.

    python benchmarks/tensor/main.py --what step --model gpt512 --json results.json
    python benchmarks/tensor/main.py --what step --ranks 4 --only torch-titan plait-sequence
    python benchmarks/tensor/main.py --what step --profile plait-tensor
    python benchmarks/tensor/main.py --what dispatch

Exit code 1 if contestants that train the same model on the same data disagree about the loss, or if an operator's
result is wrong or needed a message.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from dispatch import dispatch_task, print_dispatch
from harness.arguments import StepArguments
from harness.contestants import Build
from harness.groups import launch
from harness.report import chosen, loss_disagreements, machine, print_times
from harness.turns import checked_losses, interleave, profiled
from models import WORKLOADS
from ours import matches, rows
from peers import PEERS

NUM_BATCHES = 4


@dataclass(frozen=True)
class Arguments(StepArguments):
    """Compare plait's tensor parallelism with torch's on this machine."""

    what: Literal["step", "dispatch"] = "step"
    repeats: int = 300
    """Calls of an operator in one turn."""


def contestants() -> dict[str, Build]:
    return {**PEERS, **rows()[0]}


def step_task(model: str, names: list[str], num_rounds: int) -> dict[str, Any]:
    """On every rank: build all contestants, check their losses, let them take turns; all read the whole batch."""
    workload = WORKLOADS[model]
    batches = [workload.batch(step, 0, 1) for step in range(NUM_BATCHES)]
    builds = contestants()
    built = {name: builds[name](workload, dist.get_world_size()) for name in names}
    losses = {name: checked_losses(contestant, batches) for name, contestant in built.items()}
    seconds = interleave(built, batches, num_rounds, workload.steps_per_round)
    return {"losses": losses, "seconds": seconds}


def profile_task(model: str, name: str, out: Path | None) -> str:
    workload = WORKLOADS[model]
    contestant = contestants()[name](workload, dist.get_world_size())
    table = profiled(contestant, workload.batch(0, 0, 1), workload.steps_per_round, out)
    return f"{workload.name}, {name}: {table}"


def step(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """The training step: every number, and what is wrong."""
    if reason := rows()[1]:
        print(f"plait's rows are left out: {reason}")
    names = chosen(list(contestants()), arguments.only)
    print(f"\n## {arguments.model}, {arguments.ranks} ranks", flush=True)
    result = launch(step_task, arguments.ranks, arguments.model, names, arguments.rounds)
    print_times(arguments.model, result["seconds"], matches(arguments.ranks))
    if arguments.verbose:
        for name, losses in result["losses"].items():
            print(f"  {name:24} " + "  ".join(f"{loss:.7f}" for loss in losses))
    problems = loss_disagreements(result["losses"], [])
    if not problems:
        print("losses: all contestants agree")
    return result, problems


def dispatch(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Small operators: every number, and what is wrong."""
    print(f"\n## dispatch, {arguments.ranks} ranks", flush=True)
    microseconds, problems = launch(dispatch_task, arguments.ranks, arguments.rounds, arguments.repeats)
    print_dispatch(microseconds)
    return microseconds, problems


def main(arguments: Arguments) -> int:
    if arguments.profile:
        (name,) = chosen(list(contestants()), (arguments.profile,))
        text = launch(profile_task, arguments.ranks, arguments.model, name, arguments.profile_out)
        print(text)
        if arguments.profile_out is not None:
            arguments.profile_out.write_text(text + "\n")
        return 0
    print(machine())
    result, problems = {"step": step, "dispatch": dispatch}[arguments.what](arguments)
    if problems:
        print("\n".join(problems))
    if arguments.json is not None:
        asked = {"what": arguments.what, "model": arguments.model, "ranks": arguments.ranks}
        arguments.json.write_text(json.dumps({"machine": machine(), **asked, "result": result}, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
