"""Times plait's pipelines against torch's: a training step under every schedule, and each link of the model.

    python benchmarks/pipeline/main.py --what step --split balanced --json results.json
    python benchmarks/pipeline/main.py --what step --only one-process torch-1f1b-even plait-1f1b-even
    python benchmarks/pipeline/main.py --what step --profile torch-zbv-balanced
    python benchmarks/pipeline/main.py --what split
    python benchmarks/pipeline/main.py --what idle

Exit code 1 if contestants that train the same model on the same data disagree about the loss.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import StepArguments
from harness.contestants import Build
from harness.groups import launch
from harness.report import best_peer, chosen, loss_disagreements, machine, print_times
from harness.rows import as_json, step_rows
from harness.turns import checked_losses, interleave, profiled, ratios
from idle import idle_task, print_idle
from models import WORKLOADS, link_names
from ours import best_matches, matches, rows
from peers import ALONE, SIDE_BY_SIDE, peers
from splits import Placement, Seconds, SplitName, balanced, even, link_task, loop, print_links, print_splits, twice, v

NUM_BATCHES = 4


@dataclass(frozen=True)
class Arguments(StepArguments):
    """Compare plait's pipelines with torch's on this machine."""

    what: Literal["step", "split", "idle"] = "step"
    split: Literal["even", "balanced", "both"] = "both"
    """Blocks by count, or links by measured cost; every schedule, theirs and ours, gets the same."""
    repeats: int = 30
    """Microbatches by which a link's cost is measured."""

    @property
    def splits(self) -> tuple[SplitName, ...]:
        return get_args(SplitName) if self.split == "both" else (self.split,)


def contestants(splits: Sequence[SplitName], costs: Sequence[float]) -> dict[str, Build]:
    return peers(splits, costs) | rows(splits, costs)[0]


def step_task(
    model: str, names: list[str], splits: Sequence[SplitName], costs: Sequence[float], num_rounds: int
) -> dict[str, Any]:
    """On every rank: build all contestants, check their losses, let them take turns; all get the whole batch."""
    workload = WORKLOADS[model]
    batches = [workload.batch(step, 0, 1) for step in range(NUM_BATCHES)]
    builds = contestants(splits, costs)
    built = {name: builds[name](workload, dist.get_world_size()) for name in names}
    losses = {name: checked_losses(contestant, batches) for name, contestant in built.items()}
    seconds = interleave(built, batches, num_rounds, workload.steps_per_round)
    return {"losses": losses, "seconds": seconds}


def profile_task(model: str, name: str, splits: Sequence[SplitName], costs: Sequence[float], out: Path | None) -> str:
    workload = WORKLOADS[model]
    contestant = contestants(splits, costs)[name](workload, dist.get_world_size())
    table = profiled(contestant, workload.batch(0, 0, 1), workload.steps_per_round, out)
    return f"{workload.name}, {name}: {table}"


def measured_links(arguments: Arguments) -> Seconds:
    """Forward and backward of each link, in a process of its own."""
    seconds: Seconds = launch(link_task, 1, arguments.model, arguments.repeats)
    return seconds


def with_ideal(seconds: dict[str, list[float]], ranks: int) -> dict[str, list[float]]:
    """One line more: one process, the faster way in each round, its work shared by all ranks without any loss."""
    alone = [seconds[name] for name in ALONE if name in seconds]
    return {**seconds, "ideal": [min(turn) / ranks for turn in zip(*alone, strict=True)]} if alone else seconds


def print_best(seconds: dict[str, list[float]]) -> None:
    """Best against best: with each split, then over both."""
    lines = []
    for match in best_matches(seconds):
        if (peer := best_peer(match, seconds)) is not None:
            ratio = ratios(seconds[peer], seconds[match.row])
            spread = f"{ratio.median:.2f} times as fast as {peer} ({ratio.low:.2f} - {ratio.high:.2f})"
            lines.append(f"best against best: {match.row} is {spread}")
    print("\n".join(dict.fromkeys(lines)))  # with one split both are the same


def step(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Measures the training step; returns every number, and the faults."""
    names = chosen(list(contestants(arguments.splits, ())), arguments.only)
    if reason := rows((), ())[1]:
        print(f"plait's rows are left out: {reason}")
    print(f"\n## {arguments.model}, {arguments.ranks} ranks", flush=True)
    costs = [sum(one) for one in measured_links(arguments)]
    print_splits(costs, arguments.ranks, compared_splits(costs, arguments))
    result = launch(step_task, arguments.ranks, arguments.model, names, arguments.splits, costs, arguments.rounds)
    seconds = result["seconds"] = with_ideal(result["seconds"], arguments.ranks)
    print_times(arguments.model, seconds, matches(seconds))
    print_best(seconds)
    pairs = (*matches(seconds), *best_matches(seconds))
    measured = step_rows("pipeline", arguments.model, arguments.ranks, seconds, pairs)
    if arguments.verbose:
        for name, losses in result["losses"].items():
            print(f"  {name:28} " + "  ".join(f"{loss:.7f}" for loss in losses))
    problems = loss_disagreements(result["losses"], [SIDE_BY_SIDE])
    if not problems:
        print("losses: all contestants agree")
    return {**result, "link_costs": costs, "rows": as_json(measured)}, problems


def compared_splits(costs: Sequence[float], arguments: Arguments) -> list[tuple[str, tuple[int, ...], Placement]]:
    """The splits that the contestants get, by placement."""
    sizes = {"even": lambda where: even(len(costs), len(where)), "balanced": lambda where: balanced(costs, where)}
    placements = (loop(arguments.ranks), twice(arguments.ranks), v(arguments.ranks))
    return [(name, sizes[name](where), where) for where in placements for name in arguments.splits]


def split(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """The cost of each link, and the splits that follow."""
    print(f"\n## {arguments.model}, links, one microbatch, one process, one thread", flush=True)
    seconds = measured_links(arguments)
    costs = [sum(one) for one in seconds]
    print_links(link_names(WORKLOADS[arguments.model]), seconds)
    found = compared_splits(costs, arguments)
    print_splits(costs, arguments.ranks, found)
    return {"links": seconds, "splits": found}, []


def idle(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Idle shares, measured and simulated, with each split."""
    costs = [sum(one) for one in measured_links(arguments)]
    found = {}
    for name in arguments.splits:
        print(f"\n## {arguments.model}, {arguments.ranks} ranks, {name} split", flush=True)
        found[name] = launch(idle_task, arguments.ranks, arguments.model, name, costs)
        print_idle(found[name])
    return found, []


def main(arguments: Arguments) -> int:
    if arguments.profile:
        (name,) = chosen(list(contestants(arguments.splits, ())), (arguments.profile,))
        costs = [sum(one) for one in measured_links(arguments)]
        out = arguments.profile_out
        text = launch(profile_task, arguments.ranks, arguments.model, name, arguments.splits, costs, out)
        print(text)
        if out is not None:
            out.write_text(text + "\n")
        return 0
    print(machine())
    result, problems = {"step": step, "split": split, "idle": idle}[arguments.what](arguments)
    if problems:
        print("\n".join(problems))
    if arguments.json is not None:
        asked = {"what": arguments.what, "model": arguments.model, "ranks": arguments.ranks}
        text = {"machine": machine(), **asked, "rows": result.pop("rows", []), "result": result}
        arguments.json.write_text(json.dumps(text, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
