"""Counts the Python functions called for a unit, a microbatch and a step: the engine's cost without a clock.

    python benchmarks/overhead/calls.py                      # a table
    python benchmarks/overhead/calls.py --json now.json      # by function
    python benchmarks/overhead/calls.py --before then.json   # and what has changed, by function

Times on a shared machine differ by a third from run to run; these counts are the same each time (where ranks wait for
each other, nearly).  Rank 0 is counted, in a world of threads, after three steps.
"""

import argparse
import collections
import json
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

import plait

CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "ddp, 1 rank": ("shard=1", 100, 1, {"strategy": "ddp"}),
    "zero3, 1 rank": ("shard=1", 100, 1, {"strategy": "zero3"}),
    "ddp, 2 ranks": ("shard=2", 60, 1, {"strategy": "ddp"}),
    "zero3, 2 ranks": ("shard=2", 60, 1, {"strategy": "zero3"}),
    "1f1b": ("pipe=2", 60, 4, {"schedule": "1f1b"}),
    "zb_h1": ("pipe=2", 60, 4, {"schedule": "zb_h1"}),
}
"""Mesh, linear layers, microbatches, layout."""


def count(name: str) -> dict[str, float]:
    """Calls by function, those of C as ``C``, each divided by this rank's units, microbatches and steps."""
    mesh, layers, microbatches, layout = CASES[name]

    def body(comm: plait.Comm) -> dict[str, float]:
        with plait.empty_parameters():
            model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = plait.Engine(
            model, comm, optimizer=optimizer, loss_fn=lambda m, x: m(x).square().sum(), count_fn=len, **layout
        )
        batches = [torch.ones(2, 16)] * microbatches
        for _ in range(3):
            engine.step(batches)
        calls = collections.Counter[str]()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                file = frame.f_code.co_filename
                for begin in ("/src/", "/site-packages/", "/lib/"):
                    file = file.split(begin)[-1]
                calls[f"{file}: {frame.f_code.co_name}"] += 1
            elif event == "c_call":
                calls["C"] += 1

        sys.setprofile(note)
        engine.step(batches)
        sys.setprofile(None)
        return {key: value * comm.mesh.pipe / (layers * microbatches) for key, value in calls.items()}

    return plait.run_threads(mesh, body)[0]


def total(calls: dict[str, float]) -> float:
    """The number of calls of Python's functions."""
    return sum(calls.values()) - calls["C"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--before")
    arguments = parser.parse_args()
    before: dict[str, dict[str, float]] = {}
    if arguments.before:
        with open(arguments.before) as file:
            before = json.load(file)
    now = {name: count(name) for name in CASES}
    print("| case | calls of Python | of C | before |\n|---|---|---|---|")
    for name, calls in now.items():
        was = f"{total(before[name]):.1f} and {before[name]['C']:.1f}" if name in before else ""
        print(f"| {name} | {total(calls):.1f} | {calls['C']:.1f} | {was} |")
    for name, calls in now.items():
        then = before.get(name, {})
        more = {key: calls.get(key, 0) - then.get(key, 0) for key in calls.keys() | then.keys()} if then else {}
        for key, difference in sorted(more.items(), key=lambda item: -abs(item[1]))[:12]:
            if abs(difference) >= 0.1:
                print(f"{name}: {difference:+.1f} {key}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(now, file, indent=1)


if __name__ == "__main__":
    main()
